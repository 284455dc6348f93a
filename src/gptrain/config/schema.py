"""The type of every key of a run. Defaults are in conf/.

A class that ships has a model of its own here, found by its `_target_`. Of any other class only the
keys that our own code reads are typed; the rest belongs to the class and its signature. To add a
key: its line in conf/, its line here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from gptrain.config.data_schema import Data
from gptrain.config.kinds import (
    SEED_MAX,
    Batches,
    BelowOne,
    Betas,
    Built,
    Closed,
    Count,
    Devices,
    Duration,
    Fraction,
    Interval,
    Kept,
    Limit,
    LocalPath,
    Name,
    Open,
    Positive,
    RunName,
    TokenCount,
    Warmup,
    between,
)
from gptrain.parallel.dims import STRATEGIES as STRATEGY_NAMES

# Groups with a `_target_`: what our code reads of any class, then the classes that ship.


class Model(Built):
    compile: Literal["none", "blocks", "model"]
    activation_checkpointing: Literal["none", "selective", "full"]


class Decoder(Model, extra="forbid"):
    vocab_size: Count
    d_model: Count
    n_heads: Count
    n_layers: Count
    max_seq_len: Count


class SimpleGPT(Decoder):
    dropout: BelowOne
    activation: Literal["gelu", "gelu_tanh"]


class Llama(Decoder):
    n_kv_heads: Count
    d_ff: Count
    rope_base: Positive
    rope_scaling: Annotated[float, Field(ge=1)]
    norm_eps: Positive
    qk_norm: bool
    tie_head: bool


class HuggingFace(Model, extra="forbid"):
    vocab_size: Count
    config: dict[str, Any] | None
    path: LocalPath | None


class Loss(Closed):
    label_smoothing: BelowOne
    z_loss: NonNegativeFloat


class LanguageModel(Built, extra="forbid"):
    loss: Loss
    metrics: dict[str, Built]


class Optimizer(Built):
    lr: PositiveFloat | None
    weight_decay: NonNegativeFloat | None
    lr_scaling: Literal["none", "linear", "sqrt"]
    reference_batch_size: Count


class AdamW(Optimizer):
    betas: Betas
    eps: Positive
    fused: bool | None = None


class Muon(AdamW):
    momentum: BelowOne
    embedding_lr: PositiveFloat | None = None
    head_lr: PositiveFloat | None = None
    vector_lr: PositiveFloat | None = None


class Scheduler(Built):
    warmup_steps: Warmup | None
    warmup_tokens: TokenCount | None
    total_steps: Count | None
    total_tokens: TokenCount | None
    start_factor: Fraction
    min_factor: Fraction


class Schedule(Scheduler, extra="forbid"):
    """gptrain.optim.constant, warmup_constant, warmup_cosine, warmup_linear."""


class StableDecay(Schedule):
    decay_steps: Warmup | None
    decay_tokens: TokenCount | None


class SampleText(Built, extra="forbid"):
    prompt: Name
    n_tokens: Count


class Trainer(Built):
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"]
    devices: Devices
    num_nodes: Literal["auto"] | Count
    precision: Literal[
        "32-true", "bf16-mixed", "16-mixed", "bf16-true", "auto", "16-true", "64-true",
        "transformer-engine", "transformer-engine-float16", "32", "64", "16", "bf16", 32, 64, 16,
    ]  # fmt: skip
    max_epochs: Literal[-1] | Count | None
    max_steps: Literal[-1] | Annotated[int, between(1, 2**40)]
    min_steps: Annotated[int, between(0)] | None
    max_time: Duration
    accumulate_grad_batches: Count
    gradient_clip_val: Annotated[
        NonNegativeFloat | None, Field(description=">= 0; 0 or null for off")
    ]
    fast_dev_run: Batches
    overfit_batches: Annotated[int, between(0)] | Fraction
    limit_train_batches: Annotated[
        Interval | None,
        Field(description="a fraction in (0, 1], an integer >= 1, or null"),
    ]
    limit_val_batches: Limit
    limit_test_batches: Limit
    val_check_interval: Interval
    check_val_every_n_epoch: Count | None
    num_sanity_val_steps: Annotated[int, between(-1)] | None
    log_every_n_steps: Count  # to log nothing: logger=none
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    detect_anomaly: bool


class LightningTrainer(Trainer, extra="forbid"):
    """Of Lightning's other arguments those that no key of ours sets; typed with a +."""

    min_epochs: Annotated[int, between(0)] | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    limit_predict_batches: Limit = None
    reload_dataloaders_every_n_epochs: Annotated[int, between(0)] = 0
    sync_batchnorm: bool = False


NETS: dict[str, type[Model]] = {  # whose sizes are known
    "gptrain.models.SimpleGPT": SimpleGPT,
    "gptrain.models.Llama": Llama,
}
KNOWN: dict[str, type[Built]] = {
    **NETS,
    "gptrain.models.HuggingFace": HuggingFace,
    "gptrain.lit.LanguageModel": LanguageModel,
    "torch.optim.AdamW": AdamW,
    "gptrain.optim.Muon": Muon,
    **{f"gptrain.optim.warmup_{name}": Schedule for name in ("constant", "cosine", "linear")},
    "gptrain.optim.constant": Schedule,
    "gptrain.optim.warmup_stable_decay": StableDecay,
    "gptrain.lit.callbacks.SampleText": SampleText,
    "lightning.pytorch.Trainer": LightningTrainer,
}


# Groups without a `_target_`.


class AnyStrategy(Open):
    name: Literal[("auto", *STRATEGY_NAMES)]  # ty: ignore[invalid-type-form]
    timeout_s: Positive
    backend: Literal["nccl", "gloo", "mpi"] | None


class Strategy(AnyStrategy, extra="forbid"):
    """Of one device."""


class DDP(Strategy):
    bucket_cap_mb: Positive
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"]


class DiLoCo(Strategy):
    replicas: Count | None
    sync_every: Count
    outer_lr: PositiveFloat
    outer_momentum: BelowOne
    outer_dtype: Literal["fp32", "bf16"]


class Sharded(Strategy):
    reshard_after_forward: bool
    accumulate_shards: bool
    cpu_offload: bool


class FSDP(Sharded):
    replicas: Count


class TensorParallel(Strategy):
    tensor_parallel_size: Count | None


class FSDPTensorParallel(Sharded, TensorParallel):
    pass


class Pipeline(Strategy):
    pipeline_parallel_size: Count | None
    microbatches: Count | None
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"]


STRATEGIES: dict[str, type[Strategy]] = {
    "auto": DDP,
    "single": Strategy,
    "ddp": DDP,
    "fsdp": FSDP,
    "tensor_parallel": TensorParallel,
    "pipeline": Pipeline,
    "fsdp_tensor_parallel": FSDPTensorParallel,
    "ddp_pipeline": Pipeline,
    "diloco": DiLoCo,
}


class Checkpoint(Closed):
    name: Literal["default", "every_n_steps", "none"]
    every_n_steps: Count | None
    keep: Kept
    monitor: Name  # any that is logged
    mode: Literal["min", "max"]
    background: bool
    mirror: Name | None


class Launcher(Closed):
    max_restarts: Annotated[int, between(0)]
    timeout_s: Positive | None


class Run(Closed):
    """The whole run; a command of its own keys inherits from it.

    Attributes:
        runs_here: False for a command that speaks of another machine (a plan) or only prints: then
            only the config itself is checked, not this machine, its folders and files, and the
            command gets the config as it was composed, without a folder made for it.
        expands_run: False for a command that reads the folder of from_run by itself.
        reads_data: False for one that takes the net alone.
    """

    runs_here: ClassVar[bool] = True
    expands_run: ClassVar[bool] = True
    reads_data: ClassVar[bool] = True

    name: RunName
    task: Literal["fit", "validate", "test"]
    seed: Annotated[int, between(0, SEED_MAX)]
    max_tokens: TokenCount | None
    on_nonfinite: Literal["stop", "skip"]
    max_skips: PositiveInt
    objective: Name
    law: LocalPath | None
    output_dir: LocalPath
    run_dir: LocalPath
    ckpt_path: LocalPath | None
    allow_changes: list[str]
    init_from: LocalPath | None
    init_strict: bool
    from_run: LocalPath | None
    allowed_targets: list[str]
    debug: bool
    print_config: bool
    model: Model
    module: Built
    data: Data
    optimizer: Optimizer
    scheduler: Scheduler
    strategy: AnyStrategy
    trainer: Trainer
    callbacks: dict[str, Built | None]
    checkpoint: Checkpoint
    logger: dict[str, Built]
    profiler: Open | None
    launcher: Launcher

"""The type of every key of a run. Defaults are in conf/.

A class that ships has a model of its own here, found by its `_target_`. Of any other class only the
keys that our own code reads are typed; the rest belongs to the class and its signature. To add a
key: its line in conf/, its line here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, StrictStr

from gptrain.config import forms
from gptrain.config.forms import BelowOne, Count, Flag, Path, Positive, Target, integer, number
from gptrain.plan.dims import STRATEGIES as STRATEGY_NAMES

SEED_MAX = 2**32 - 1  # numpy's generators take no more
WORKERS_MAX = 384  # cores of the largest two-socket x86 server of 2025 (2 x AMD EPYC 9965)


class Closed(BaseModel, extra="forbid"):
    """Every key is known."""


class Open(BaseModel, extra="allow"):
    """Keys that our code reads; every other key belongs to the `_target_`."""


# Groups with a `_target_`: what our code reads of any class, then the classes that ship.


class Model(Open):
    compile: Literal["none", "blocks", "model"]
    activation_checkpointing: Literal["none", "selective", "full"]


class SimpleGPT(Model, extra="forbid"):
    vocab_size: Count
    d_model: Count
    n_heads: Count
    n_layers: Count
    max_seq_len: Count
    dropout: BelowOne
    activation: Literal["gelu", "gelu_tanh"]


class Loss(Closed):
    label_smoothing: BelowOne
    z_loss: forms.NotNegative


class LanguageModel(Open, extra="forbid"):
    loss: Loss
    metrics: forms.Node


class Optimizer(Open):
    lr: number("must be > 0", gt=0) | None
    weight_decay: forms.NotNegative | None
    lr_scaling: Literal["none", "linear", "sqrt"]
    reference_batch_size: Count


class AdamW(Optimizer):
    betas: forms.Betas
    eps: Positive
    fused: Flag | None = None


class Muon(Optimizer):
    betas: forms.Betas
    eps: Positive
    momentum: BelowOne


class Scheduler(Open):
    warmup_steps: forms.Warmup | None
    total_steps: Count | None
    start_factor: forms.Fraction
    min_factor: forms.Fraction


class Schedule(Scheduler, extra="forbid"):
    """gptrain.optim.constant, warmup_constant, warmup_cosine, warmup_linear."""


class StableDecay(Schedule):
    decay_fraction: number("must be in (0, 1]", gt=0, le=1)


class SampleText(Closed):
    prompt: StrictStr
    n_tokens: Count


class Logger(Open):
    save_dir: Path


Precision = Literal[
    "32-true", "bf16-mixed", "16-mixed", "bf16-true", "auto", "16-true", "64-true",
    "transformer-engine", "transformer-engine-float16",
]  # fmt: skip


class Trainer(Open):
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"]
    devices: forms.Devices
    num_nodes: Count
    precision: Precision | Literal["32", "64", "16", "bf16", 32, 64, 16]
    max_epochs: forms.MaxEpochs | None
    max_steps: forms.MaxSteps
    min_steps: integer(0) | None
    max_time: forms.Duration | None
    accumulate_grad_batches: Count
    gradient_clip_val: number("must be > 0, or null for off", gt=0) | None
    fast_dev_run: forms.Batches
    overfit_batches: forms.Limit
    limit_train_batches: forms.Limit | None
    limit_val_batches: forms.Limit | None
    limit_test_batches: forms.Limit | None
    val_check_interval: forms.Interval
    check_val_every_n_epoch: Count | None
    num_sanity_val_steps: integer(-1) | None
    log_every_n_steps: Count  # to log nothing: logger=none
    enable_progress_bar: Flag | None
    enable_model_summary: Flag | None
    deterministic: forms.FlagOrWarn | None
    benchmark: Flag | None
    inference_mode: Flag
    detect_anomaly: Flag


class LightningTrainer(Trainer, extra="forbid"):
    """Of Lightning's other arguments those that no key of ours sets; typed with a +."""

    min_epochs: integer(0) | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    limit_predict_batches: forms.Limit | None = None
    reload_dataloaders_every_n_epochs: integer(0) = 0
    sync_batchnorm: Flag = False


GROUPS: dict[str, type[BaseModel]] = {
    "model": Model, "module": Open, "optimizer": Optimizer, "scheduler": Scheduler,
    "trainer": Trainer,
}  # fmt: skip
KNOWN: dict[str, type[BaseModel]] = {
    "gptrain.models.SimpleGPT": SimpleGPT,
    "gptrain.lit.LanguageModel": LanguageModel,
    "torch.optim.AdamW": AdamW,
    "gptrain.optim.Muon": Muon,
    **{f"gptrain.optim.warmup_{name}": Schedule for name in ("constant", "cosine", "linear")},
    "gptrain.optim.constant": Schedule,
    "gptrain.optim.warmup_stable_decay": StableDecay,
    "gptrain.lit.callbacks.SampleText": SampleText,
    "gptrain.lit.loggers.TensorBoardLogger": Logger,
    "gptrain.lit.loggers.CSVLogger": Logger,
    "lightning.pytorch.Trainer": LightningTrainer,
}


# Groups without a `_target_`.


class Data(Open):
    """Of any data group; what else its yaml has, its datasets refer to."""

    batch_size: Count
    global_batch_size: Count | None
    num_workers: integer(0, WORKERS_MAX)
    train: Target
    val: Target
    test: Target | None = None


class DummyText(Data):
    num_samples: Count
    seq_len: integer(2)


class Text(Data):
    seq_len: Count
    path: forms.Paths | None
    pattern: forms.Name
    tokenizer: Path
    val_fraction: number("must be in (0, 1)", gt=0, lt=1)


class Tokens(Data):
    seq_len: Count
    train_path: forms.Paths
    val_path: forms.Paths
    dtype: Literal["uint16", "uint32"]


DATA: dict[str, type[Data]] = {  # by the class of data.train
    "gptrain.data.DummyTextDataset": DummyText,
    "gptrain.data.TextDataset.from_corpus": Text,
    "gptrain.data.TokenDataset": Tokens,
}


class Strategy(Closed):
    name: Literal[("auto", *STRATEGY_NAMES)]
    timeout_s: Positive
    backend: Literal["nccl", "gloo", "mpi"] | None


class DDP(Strategy):
    bucket_cap_mb: Positive
    gradient_as_bucket_view: Flag
    static_graph: Flag
    find_unused_parameters: Flag
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"]


class FSDP(Strategy):
    reshard_after_forward: Flag
    accumulate_shards: Flag
    cpu_offload: Flag


class TensorParallel(Strategy):
    tensor_parallel_size: Count | None


class FSDPTensorParallel(FSDP, TensorParallel):
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
}


class Checkpoint(Closed):
    name: Literal["default", "every_n_steps", "none"]
    every_n_steps: Count | None
    keep: integer(2)  # one file alone is one disk error from nothing
    monitor: forms.Name  # any that is logged
    mode: Literal["min", "max"]
    background: Flag


class Launcher(Closed):
    max_restarts: integer(0)
    timeout_s: Positive | None


class Run(Closed):
    """The whole run; a command of its own keys inherits from it.

    Attributes:
        runs_here: False for a command that speaks of another machine (a plan): then only the
            config itself is checked, not this machine, its folders and files.
    """

    runs_here: ClassVar[bool] = True

    name: forms.RunName
    task: Literal["fit", "validate", "test"]
    seed: integer(0, SEED_MAX)
    max_tokens: number("must be >= 1", ge=1, le=2**63) | None
    on_nonfinite: Literal["stop", "skip"]
    objective: forms.Name
    output_dir: Path
    run_dir: Path
    ckpt_path: Path | None
    allow_changes: forms.Names
    init_from: Path | None
    init_strict: Flag
    from_run: Path | None
    allowed_targets: forms.Names
    debug: Flag
    print_config: Flag
    model: Target
    module: Target
    data: forms.Node
    optimizer: Target
    scheduler: Target
    strategy: forms.Node
    trainer: Target
    callbacks: dict[str, Target | None]
    checkpoint: Checkpoint
    logger: dict[str, Target]
    profiler: Annotated[dict[str, Any], Field(max_length=0)] | Target | None
    launcher: Launcher

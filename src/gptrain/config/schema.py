"""The type of every key of a run: ranges, words and forms. Defaults are in conf/.

A class that ships has a model of its own here, found by its `_target_`. Of any other class only the
keys that our own code reads are typed; the rest belongs to the class and its signature. To add a
key: its line in conf/, its line here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, PlainValidator, StrictStr, ValidationError

from gptrain.config.forms import (
    INT32_MAX,
    SEED_MAX,
    WORKERS_MAX,
    Batches,
    BelowOne,
    Betas,
    Count,
    CountOrNone,
    Flag,
    Fraction,
    Interval,
    Limit,
    Name,
    Node,
    NotNegative,
    OnOrWarn,
    Path,
    Paths,
    Positive,
    Seconds,
    Warmup,
    Words,
    checkpoint_path,
    choice,
    devices,
    duration,
    integer,
    number,
    path,
    run_name,
    says,
)  # fmt: skip
from gptrain.config.suggest import find_alias, nearest_key
from gptrain.problems import Problem, show

OF_HYDRA = {"_target_", "_args_", "_recursive_", "_convert_", "_partial_"}  # in any node


class Closed(BaseModel, extra="forbid"):
    """Every key is known."""


class Open(BaseModel, extra="allow"):
    """Keys that our code reads; every other key belongs to the `_target_`."""


# Groups with a `_target_`: what our code reads of any class, then the classes that ship.


class Model(Open):
    compile: choice("none", "blocks", "model")
    activation_checkpointing: choice("none", "selective", "full")


class SimpleGPT(Model, extra="forbid"):
    vocab_size: Count
    d_model: Count
    n_heads: Count
    n_layers: Count
    max_seq_len: Count
    dropout: BelowOne
    activation: choice("gelu", "gelu_tanh")


class Loss(Closed):
    label_smoothing: BelowOne
    z_loss: NotNegative


class LanguageModel(Closed):
    loss: Loss
    metrics: Node


class Optimizer(Open):
    lr: Positive | None
    weight_decay: NotNegative | None
    lr_scaling: choice("none", "linear", "sqrt")
    reference_batch_size: Count


class AdamW(Optimizer):
    betas: Betas
    eps: Positive
    fused: Flag | None = None


class Muon(Optimizer):
    betas: Betas
    eps: Positive
    momentum: BelowOne


class Scheduler(Open):
    warmup_steps: Warmup | None
    total_steps: Count | None
    start_factor: Fraction
    min_factor: Fraction


class Schedule(Scheduler, extra="forbid"):
    """gptrain.optim.constant, warmup_constant, warmup_cosine, warmup_linear."""


class StableDecay(Schedule):
    decay_share: number("must be in (0, 1]", gt=0, le=1)


class DummyText(Closed):
    num_samples: Count
    seq_len: integer(2)
    vocab_size: Count
    seed: int


class FromCorpus(Closed):
    split: choice("train", "val")
    path: Paths | None
    pattern: Name
    tokenizer: Path
    vocab_size: Count
    seq_len: Count
    val_fraction: number("must be in (0, 1)", gt=0, lt=1)
    cache_dir: Path


class Tokens(Closed):
    path: Paths
    seq_len: Count
    dtype: choice("uint16", "uint32") | None = None
    vocab_size: Count | None = None
    keep_tail: Flag = False


class SampleText(Closed):
    prompt: StrictStr
    n_tokens: Count


class Logger(Open):
    save_dir: Path


class Trainer(Open):
    accelerator: choice("auto", "cpu", "gpu", "mps", "tpu", unlisted=("cuda",))
    devices: Annotated[Any, AfterValidator(devices)]
    num_nodes: Count
    precision: choice(
        "32-true", "bf16-mixed", "16-mixed", "bf16-true", "auto",
        unlisted=("16-true", "64-true", "transformer-engine", "transformer-engine-float16", "32",
                  "64", "16", "bf16", 32, 64, 16),
    )  # fmt: skip
    max_epochs: says("must be >= 1, -1 for no limit, or null", Literal[-1] | Count) | None
    max_steps: says(
        "must be >= 1, or -1 for no limit together with trainer.max_time or trainer.max_epochs",
        Literal[-1] | Annotated[int, Field(strict=True, ge=1, le=2**40)],
    )
    min_steps: CountOrNone | None
    max_time: Annotated[Any, AfterValidator(duration)] | None
    accumulate_grad_batches: Count
    gradient_clip_val: number("must be > 0, or null for off", gt=0) | None
    fast_dev_run: Batches
    overfit_batches: Limit
    limit_train_batches: Limit | None
    limit_val_batches: Limit | None
    limit_test_batches: Limit | None
    val_check_interval: Interval
    check_val_every_n_epoch: Count | None
    num_sanity_val_steps: says("must be >= -1", Annotated[int, Field(strict=True, ge=-1)]) | None
    log_every_n_steps: integer(1, words="must be >= 1; to log nothing: logger=none")
    enable_progress_bar: Flag | None
    enable_model_summary: Flag | None
    deterministic: OnOrWarn | None
    benchmark: Flag | None
    inference_mode: Flag
    detect_anomaly: Flag


GROUPS: dict[str, type[BaseModel]] = {
    "model": Model, "module": Open, "optimizer": Optimizer, "scheduler": Scheduler,
    "trainer": Trainer,
}  # fmt: skip
KNOWN: dict[str, type[BaseModel]] = {
    "gptrain.models.SimpleGPT": SimpleGPT,
    "gptrain.lit.LanguageModel": LanguageModel,
    "torch.optim.AdamW": AdamW,
    "gptrain.optim.Muon": Muon,
    "gptrain.optim.constant": Schedule,
    "gptrain.optim.warmup_constant": Schedule,
    "gptrain.optim.warmup_cosine": Schedule,
    "gptrain.optim.warmup_linear": Schedule,
    "gptrain.optim.warmup_stable_decay": StableDecay,
    "gptrain.data.DummyTextDataset": DummyText,
    "gptrain.data.TextDataset.from_corpus": FromCorpus,
    "gptrain.data.TokenDataset": Tokens,
    "gptrain.lit.callbacks.SampleText": SampleText,
    "gptrain.lit.loggers.TensorBoardLogger": Logger,
    "gptrain.lit.loggers.CSVLogger": Logger,
    "lightning.pytorch.Trainer": Trainer,
}


# Groups without a `_target_`.


class Data(Open):
    """Of the data group itself; what else a yaml has there, its datasets refer to."""

    batch_size: Count
    global_batch_size: Count | None
    num_workers: integer(0, WORKERS_MAX)


class Strategy(Closed):
    name: StrictStr
    timeout_s: Seconds
    backend: choice("nccl", "gloo", "mpi") | None


class DDP(Strategy):
    bucket_cap_mb: number("must be > 0", gt=0, le=INT32_MAX)
    gradient_as_bucket_view: Flag
    static_graph: Flag
    find_unused_parameters: Flag
    comm_hook: choice("none", "bf16", "fp16", "powersgd")


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
    schedule: choice("gpipe", "1f1b", "interleaved_1f1b")


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
    name: choice("default", "every_n_steps", "none")
    every_n_steps: Count | None
    keep: integer(2, words="must be >= 2, one file alone is one disk error from nothing")
    monitor: Name
    mode: choice("min", "max")
    background: Flag


class Launcher(Closed):
    max_restarts: integer(0)
    timeout_s: Seconds | None


class Run(Closed):
    """The whole run; a command of its own keys inherits from it.

    Attributes:
        runs_here: False for a command that speaks of another machine (a plan): then only the
            config itself is checked, not this machine, its folders and files.
    """

    runs_here: ClassVar[bool] = True

    name: Annotated[Any, PlainValidator(run_name)]
    task: choice("fit", "validate", "test")
    seed: integer(0, SEED_MAX)
    max_tokens: number("must be >= 1", ge=1, le=2**63) | None
    on_nonfinite: choice("stop", "skip")
    objective: Name
    output_dir: Path
    run_dir: Path
    ckpt_path: Annotated[Any, AfterValidator(checkpoint_path)] | None
    allow_changes: Words
    init_from: Annotated[Any, AfterValidator(path)] | None
    init_strict: Flag
    from_run: Annotated[Any, AfterValidator(path)] | None
    allowed_targets: Words
    debug: Flag
    print_config: Flag
    model: Node
    module: Node
    data: Data
    optimizer: Node
    scheduler: Node
    strategy: Node
    trainer: Node
    callbacks: Node
    checkpoint: Checkpoint
    logger: Node
    profiler: Node
    launcher: Launcher


NATIVE = {  # pydantic's own kinds of error -> our words
    "missing": "missing, the run needs it",
    "model_type": "not a group of keys",
    "model_attributes_type": "not a group of keys",
    "string_type": "not a text",
    "int_type": "not an integer",
}
DATASETS = {  # nothing runs without them -> what to try
    "data.train": "data=<choice>",
    "data.val": "trainer.limit_val_batches=0 with any data.val",
}


def find_wrong_values(values: dict[str, Any], schema: type[Run] = Run) -> Iterator[Problem]:
    """Each value that is wrong by itself, each key that nothing reads or that is missing."""
    yield from _judge(schema, values, "", values)
    strategy = values.get("strategy")
    if isinstance(strategy, dict):
        name = strategy.get("name")
        if name in STRATEGIES:
            yield from _judge(STRATEGIES[name], strategy, "strategy", values)
        else:
            yield Problem("strategy.name", name, "unknown", ", ".join(STRATEGIES))
    for place, node in targets(values):
        target = node["_target_"]
        if not isinstance(target, str) or not re.fullmatch(r"[^\W\d]\w*(\.\w+)+", target):
            yield Problem(f"{place}._target_", show(target), "not a dotted name of a class")
        elif model := KNOWN.get(target) or GROUPS.get(place):
            own = {key: value for key, value in node.items() if key not in OF_HYDRA}
            yield from _judge(model, own, place, values)
    yield from _find_missing_targets(values)


def targets(node: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted key and node of all that has a `_target_`."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from targets(item, f"{place}[{index}]")
    if isinstance(node, dict):
        if "_target_" in node:
            yield place, node
        for key, item in node.items():
            yield from targets(item, f"{place}.{key}" if place else str(key))


def unknown_key(key: str, value: Any, values: dict[str, Any]) -> Problem:
    """A key that nothing reads, with the one that may have been meant."""
    group, _, leaf = key.rpartition(".")
    readers = [name for name, model in STRATEGIES.items() if leaf in model.model_fields]
    if group == "strategy" and readers:
        return Problem(
            key,
            value,
            f"no effect under strategy={(values.get('strategy') or {}).get('name')}",
            f"under strategy={', '.join(readers)}",
            f"strategy={readers[0]}, or leave {leaf} out",
        )
    if alias := find_alias(key, show(value)):
        return Problem(key, value, "unknown key", attempt=alias)
    siblings = values.get(group) if isinstance(values.get(group), dict) else {}
    near = nearest_key(key, known_keys() | {f"{group}.{name}" for name in siblings})
    if near in known_keys() and near == key:
        near = None  # other choices of its group have it
    names = [name for name in siblings if name != "_target_"]
    if near is None:
        return Problem(
            key,
            value,
            f"no such key in this {group}" if group else "unknown key",
            ", ".join(names),
            "" if names else "--help",
        )
    return Problem(key, value, f"unknown key, did you mean {near}? (new keys need +)")


def known_keys() -> set[str]:
    """Dotted keys of the run and of the groups' classes that ship."""
    places = [("", Run), ("data", Data), ("checkpoint", Checkpoint), ("launcher", Launcher)]
    places += [*GROUPS.items(), ("model", SimpleGPT), ("optimizer", Muon), ("optimizer", AdamW)]
    places += [("strategy", model) for model in STRATEGIES.values()]
    places += [("data", DummyText), ("data", FromCorpus)]
    return {f"{place}.{key}".lstrip(".") for place, model in places for key in model.model_fields}


def _judge(
    model: type[BaseModel], node: dict[str, Any], place: str, values: dict[str, Any]
) -> Iterator[Problem]:
    try:
        model.model_validate(node)
        return
    except ValidationError as error:
        found = error.errors(include_url=False)
    for one in found:
        parts = [str(part) for part in (place, *one["loc"]) if isinstance(part, str) and part]
        key, kind = ".".join(parts), one["type"]
        if kind == "extra_forbidden":
            yield unknown_key(key, one["input"], values)
            continue
        value = None if kind == "missing" else show(one["input"])
        words = NATIVE.get(kind) or one.get("ctx", {}).get("message", one["msg"])
        yield Problem(key, value, words, one.get("ctx", {}).get("allowed", ""), _example(key, kind))


def _find_missing_targets(values: dict[str, Any]) -> Iterator[Problem]:
    def node_at(place: str) -> Any:
        group, _, leaf = place.partition(".")
        node = values.get(group)
        return (node.get(leaf) if isinstance(node, dict) else None) if leaf else node

    for place in GROUPS:
        if isinstance(node_at(place), dict) and "_target_" not in node_at(place):
            wrong, attempt = "missing, nothing says what to build", f"{place}=<choice>"
            yield Problem(f"{place}._target_", None, wrong, attempt=attempt)
    for place, attempt in DATASETS.items() if isinstance(values.get("data"), dict) else ():
        if not isinstance(node_at(place), dict) or "_target_" not in node_at(place):
            wrong = "every run needs it, a mapping with a _target_"
            yield Problem(place, show(node_at(place)), wrong, attempt=attempt)
    for group in ("callbacks", "logger"):
        for name, node in (values.get(group) or {}).items():
            if node is not None and not (isinstance(node, dict) and "_target_" in node):
                key = f"{group}.{name}"
                yield Problem(key, show(node), "no _target_", attempt=f"'~{key}'")
    if values.get("profiler") and "_target_" not in values["profiler"]:
        yield Problem("profiler", None, "no _target_", attempt="profiler=simple")


def _example(key: str, kind: str) -> str:
    if kind == "missing" and key in (
        *GROUPS,
        "data",
        "strategy",
        "callbacks",
        "checkpoint",
        "logger",
        "profiler",
    ):
        return f"{key}=<choice>"
    return {"trainer.devices": "trainer.devices=1"}.get(key, "")

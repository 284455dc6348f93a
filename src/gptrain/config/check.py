"""What must fit together in a config, known without torch and without looking at the machine.

A rule is one `if wrong: yield Problem(...)`. `run.get` gives None for a key that was found wrong, so
that no mistake is told twice. Rules about `model.*` hold for SimpleGPT alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptrain.config.schema import STRATEGIES, Run, find_wrong_values, known_keys, unknown_key
from gptrain.launch.process import this_process
from gptrain.plan import (
    BatchPlan,
    ParallelDims,
    effective_max_epochs,
    parallel_dims,
    plan_batch,
    run_steps,
)
from gptrain.problems import DONE, Problem, show

DUMMY = "gptrain.data.DummyTextDataset"
SIMPLE_GPT = "gptrain.models.SimpleGPT"
DECAYING = {f"gptrain.optim.warmup_{way}" for way in ("cosine", "linear", "stable_decay")}
FP16 = ("16-mixed", 16, "16", "16-true")  # scaled losses, or weights in fp16
ANY_NET = ("auto", "single", "ddp")  # strategies that take any net


@dataclass
class Config:
    """A config as plain values, and what was found wrong with it.

    Attributes:
        values: every reference resolved.   raw: references as they were written.
        wrong: keys that a problem has named.
    """

    values: dict[str, Any]
    raw: dict[str, Any]
    schema: type[Run] = Run
    problems: list[Problem] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.code != DONE]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; `default` where it is absent, or was found wrong."""
        parts = key.split(".")
        if any(".".join(parts[: i + 1]) in self.wrong for i in range(len(parts))):
            return default
        found = _at(self.values, key)
        return default if found is None else found

    def source(self, key: str) -> str:
        """The key that a value was copied from by a reference; else the key itself."""
        seen = {key}
        while match := re.fullmatch(r"\$\{([\w.]+)\}", str(_at(self.raw, key))):
            if match[1] in seen or _at(self.raw, match[1]) is None:
                break
            key = match[1]
            seen.add(key)
        return key

    def add(self, found: Iterator[Problem]) -> None:
        """Keeps problems, each key once, and tells of a reference where its value was written."""
        for problem in found:
            key = self.source(problem.key) if problem.key else ""
            if key not in self.wrong or not key:
                parts = (key, problem.value, problem.wrong, problem.allowed, problem.attempt)
                self.problems.append(Problem(*parts, problem.code))
            if problem.code != DONE:
                self.wrong |= {key, problem.key} - {""}

    def error(self, key: str, wrong: str, attempt: str = "", allowed: str = "") -> Problem:
        """A problem of a key, with its value."""
        return Problem(key, show(_at(self.values, key)), wrong, allowed, attempt)

    def warning(self, key: str, wrong: str, attempt: str = "") -> Problem:
        """The same, of a run that may start."""
        return Problem(key, show(_at(self.values, key)), wrong, attempt=attempt, code=DONE)


def check_config(cfg: DictConfig, schema: type[Run] = Run) -> Config:
    """Everything that is wrong with a config by itself. Hydra's own node is not looked at."""
    cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    OmegaConf.set_struct(cfg, False)
    raw = OmegaConf.to_container(cfg)
    values, unresolved = _resolve(cfg)
    run = Config(values, raw, schema)
    run.add(iter(unresolved))
    run.add(find_wrong_values(values, schema))
    for rule in (check_model, check_data, check_length, check_strategy, check_run):
        run.add(rule(run))
    world_size = find_world_size(run)
    if world_size is not None:
        run.add(check_world(run, world_size))
    return run


def count_devices(value: Any) -> int | None:
    """Ranks on one node that trainer.devices asks for; None where the machine decides."""
    if isinstance(value, str) and "," in value:
        return len([part for part in value.split(",") if part])
    if value in (None, "auto", -1, "-1"):
        return None
    return len(value) if isinstance(value, list) else int(value)


def find_world_size(run: Config) -> int | None:
    """Ranks of the whole job, where the config or a launcher says it."""
    n_local, n_nodes = count_devices(run.get("trainer.devices")), run.get("trainer.num_nodes")
    try:
        process = this_process()
    except (ValueError, KeyError):
        return None  # preflight says so
    if process.is_rank:
        return process.world_size
    return n_local * n_nodes if n_local and n_nodes else None


def check_model(run: Config) -> Iterator[Problem]:
    """The sizes of a SimpleGPT, and of what trains it."""
    if run.get("model._target_") != SIMPLE_GPT:
        return
    width, heads, layers = (run.get(f"model.{key}") for key in ("d_model", "n_heads", "n_layers"))
    if width and heads and width % heads:
        below = width // heads * heads
        near = ", ".join(str(size) for size in (below, below + heads) if size)
        yield run.error("model.d_model", f"not divisible by model.n_heads={heads}; nearest: {near}")
    size = run.get("strategy.tensor_parallel_size")
    if size and heads and heads % size:
        wrong = f"does not divide model.n_heads={heads}, a rank must hold whole heads"
        yield run.error("strategy.tensor_parallel_size", wrong, allowed=divisors(heads))
    stages = (run.get("strategy.pipeline_parallel_size") or 0) * stages_per_rank(run)
    if layers and stages > layers:
        wrong = f"{stages} stages, but model.n_layers={layers}: each holds at least one"
        allowed = f"1 .. {layers // stages_per_rank(run)}"
        yield run.error("strategy.pipeline_parallel_size", wrong, allowed=allowed)
    longest, vocabulary = run.get("model.max_seq_len"), run.get("model.vocab_size")
    for part in ("data.train", "data.val", "data.test"):
        target = run.get(f"{part}._target_", "")
        if not str(target).startswith("gptrain.data."):
            continue
        length = run.get(f"{part}.seq_len")
        positions = length - (target == DUMMY) if length else 0  # its last token is a target only
        if longest and positions > longest:
            attempt = f"data.seq_len={longest} or model.max_seq_len={positions}"
            wrong = f"longer than model.max_seq_len={longest}"
            yield run.error(f"{part}.seq_len", wrong, attempt)
        size = run.get(f"{part}.vocab_size")
        if size and vocabulary and size > vocabulary:
            wrong = f"more tokens than model.vocab_size={vocabulary}"
            yield run.error(f"{part}.vocab_size", wrong, f"{part}.vocab_size={vocabulary}")
        tokenizer = run.get(f"{part}.tokenizer")
        if vocabulary and vocabulary < 256 and tokenizer in ("bytes", "bpe"):
            wrong = f"data.tokenizer={tokenizer} has at least the 256 bytes"
            yield run.error("model.vocab_size", wrong, "model.vocab_size=256")


def check_data(run: Config) -> Iterator[Problem]:
    """The batch."""
    if run.get("data.global_batch_size") and run.get("trainer.accumulate_grad_batches", 1) != 1:
        wrong = "data.global_batch_size is set too, and derives it"
        attempt = "trainer.accumulate_grad_batches=1, or data.global_batch_size=null"
        yield run.error("trainer.accumulate_grad_batches", wrong, attempt)


def check_length(run: Config) -> Iterator[Problem]:
    """What ends the run, and a schedule that needs to know when."""
    warmup, total = run.get("scheduler.warmup_steps"), run.get("scheduler.total_steps")
    if warmup and total and warmup > total:
        wrong, attempt = f"must be <= scheduler.total_steps={total}", f"={total // 10}"
        yield run.error("scheduler.warmup_steps", wrong, f"scheduler.warmup_steps{attempt}")
    steps, tokens = run.get("trainer.max_steps"), run.get("max_tokens")
    if tokens and steps and steps != -1:
        wrong = f"excludes trainer.max_steps={steps}: both end the run"
        yield run.error("max_tokens", wrong, "trainer.max_steps=-1, or max_tokens=null")
    if steps and 0 < steps < run.get("trainer.min_steps", 0):
        yield run.error("trainer.min_steps", f"more than trainer.max_steps={steps}")
    if run.get("task") != "fit" or run.get("trainer.fast_dev_run"):
        return
    if run.get("trainer.limit_train_batches") == 0:
        attempt = "task=validate, or trainer.limit_train_batches=null"
        yield run.error("trainer.limit_train_batches", "nothing is left to train on", attempt)
    limits = {"trainer.max_epochs", "trainer.max_steps", "trainer.max_time", "max_tokens"}
    if run.wrong & {*limits, "trainer", "trainer._target_"}:
        return
    trainer = run.values["trainer"]
    if effective_max_epochs(trainer, tokens) is None and steps == -1 and tokens is None:
        if trainer["max_time"] is None:
            words = ", ".join(sorted(limits - {"max_tokens"}))
            yield Problem(
                "", None, f"no stop condition: set one of {words}", attempt="trainer.max_epochs=3"
            )
        elif run.get("scheduler._target_") in DECAYING and total is None:
            wrong = "this schedule decays over a run whose length in steps trainer.max_time hides"
            attempt = "scheduler=warmup_constant, or scheduler.total_steps=<steps>"
            yield run.error("scheduler.total_steps", wrong, attempt)


def check_strategy(run: Config) -> Iterator[Problem]:
    """Strategy, devices, precision and compilation."""
    name, precision = run.get("strategy.name"), run.get("trainer.precision")
    accelerator, batch = run.get("trainer.accelerator"), run.get("data.batch_size")
    n_local, n_nodes = count_devices(run.get("trainer.devices")), run.get("trainer.num_nodes")
    if name == "single" and n_local and n_nodes and n_local * n_nodes > 1:
        key = "trainer.devices" if n_local > 1 else "trainer.num_nodes"
        yield run.error(key, "more than one device under strategy=single", "strategy=ddp")
    if name not in (None, "single", "auto") and n_local == n_nodes == 1:
        yield Problem("strategy", name, "no effect on one device", "", "trainer.devices=2", DONE)
    if accelerator == "cpu":
        yield from check_cpu(run)
        if run.get("strategy.cpu_offload"):
            wrong = "no effect under trainer.accelerator=cpu"
            yield run.error("strategy.cpu_offload", wrong, "strategy.cpu_offload=false")
    if (
        precision == "16-true"
        and run.get("task") == "fit"
        and run.get("optimizer._target_") == "torch.optim.AdamW"
    ):
        wrong = "Adam's eps is zero in fp16, training ends in NaN"
        yield run.error("trainer.precision", wrong, "trainer.precision=bf16-true")
    if name in STRATEGIES and name not in ANY_NET:
        compiles, checkpoints = run.get("model.compile"), run.get("model.activation_checkpointing")
        if precision in FP16:
            wrong = f"strategy={name} does not scale losses"
            yield run.error("trainer.precision", wrong, "trainer.precision=bf16-mixed")
        if compiles == "model":
            wrong = f"under strategy={name} collectives and hooks lie between the blocks"
            yield run.error("model.compile", wrong, "model.compile=blocks")
        elif "tensor" in name and compiles == "blocks" and checkpoints in ("selective", "full"):
            wrong = f"under strategy={name} torch cannot compile what is recomputed from sharded weights"
            attempt = "model.compile=none, or model.activation_checkpointing=none"
            yield run.error("model.compile", wrong, attempt)
    if "pipeline" in str(name) and batch:
        yield from _check_microbatches(
            run, batch, run.get("strategy.pipeline_parallel_size") or n_local
        )


def check_cpu(run: Config) -> Iterator[Problem]:
    """What no CPU can do."""
    precision = run.get("trainer.precision")
    if precision in FP16 or str(precision).startswith("transformer-engine"):
        yield run.error("trainer.precision", "not supported on CPU", "trainer.precision=bf16-mixed")
    if run.get("strategy.backend") == "nccl":
        yield run.error("strategy.backend", "nccl needs GPUs", "strategy.backend=gloo")


def _check_microbatches(run: Config, batch: int, stages: int | None) -> Iterator[Problem]:
    given, schedule = run.get("strategy.microbatches"), run.get("strategy.schedule")
    micro = given or (2 * stages if stages and "strategy.microbatches" not in run.wrong else None)
    key = "strategy.microbatches" if given else "data.batch_size"
    if micro and batch % micro:
        wrong = f"does not divide data.batch_size={batch}"
        wrong = wrong if given else f"not divisible into {micro} microbatches, two per stage"
        yield run.error(key, wrong, f"data.batch_size={micro * max(1, batch // micro)}")
    elif given and stages and schedule == "1f1b" and given < stages:
        wrong = f"1f1b needs at least one microbatch per stage ({stages})"
        attempt = f"strategy.microbatches={2 * stages}, or strategy.schedule=gpipe"
        yield run.error(key, wrong, attempt)
    elif given and stages and schedule == "interleaved_1f1b" and given % stages:
        wrong = f"no multiple of the {stages} ranks, as interleaved_1f1b needs"
        yield run.error(key, wrong, f"strategy.microbatches={2 * stages}")


def check_run(run: Config) -> Iterator[Problem]:
    """Where the run starts from, what it saves and measures."""
    if run.get("ckpt_path") and run.get("init_from"):
        yield run.error(
            "init_from", "excludes ckpt_path: fresh weights or an exact resume, not both"
        )
    known = known_keys()
    for key in run.get("allow_changes", []):
        if _at(run.values, key) is None and key not in known:
            yield run.error("allow_changes", unknown_key(key, None, run.values).wrong + f": {key}")
    starts = any(run.get(key) for key in ("ckpt_path", "init_from", "from_run"))
    if (
        run.get("task") in ("validate", "test")
        and not starts
        and not run.get("trainer.fast_dev_run")
    ):
        yield run.warning("task", "no ckpt_path: it measures initial weights", "ckpt_path=best")
    every, name = run.get("checkpoint.every_n_steps"), run.get("checkpoint.name")
    if name == "none" and every:
        wrong, attempt = "no effect under checkpoint=none", "checkpoint=every_n_steps"
        yield run.error("checkpoint.every_n_steps", wrong, attempt)
    if name == "every_n_steps" and every is None:
        yield run.error("checkpoint.every_n_steps", "required under checkpoint=every_n_steps")
    if run.get("optimizer.lr", 0) > 1 and str(run.get("optimizer._target_")).endswith(
        ("AdamW", "Muon")
    ):
        yield run.warning("optimizer.lr", "above 1; AdamW and Muon learn between 1e-5 and 1e-1")
    unused = run.get("optimizer.reference_batch_size") != 32
    if run.get("optimizer.lr_scaling") == "none" and unused:
        wrong = "no effect under optimizer.lr_scaling=none"
        yield run.warning("optimizer.reference_batch_size", wrong)
    for key in ("checkpoint.monitor", "objective"):
        if run.get(key) == "val/bits_per_byte" and run.get("data.val._target_") == DUMMY:
            yield run.error(key, "random tokens stand for no bytes", f"{key}=val/loss")


def check_world(run: Config, world_size: int) -> Iterator[Problem]:
    """How so many ranks share the work: sizes, batch and steps."""
    dims = yield from _check_dims(run, world_size)
    size, accumulate = run.get("data.batch_size"), run.get("trainer.accumulate_grad_batches")
    if dims is None or not size or not accumulate or "data.global_batch_size" in run.wrong:
        return
    try:
        batch = plan_batch(size, run.get("data.global_batch_size"), accumulate, dims.data)
    except ValueError as error:
        yield run.error("data.global_batch_size", str(error))
        return
    n_samples = run.get("data.train.num_samples")
    if run.get("data.train._target_") == DUMMY and n_samples and run.get("task") == "fit":
        yield from _check_steps(run, batch, n_samples)


def find_dims(run: Config, world_size: int) -> ParallelDims | None:
    """Ranks along each axis; None where they do not fit."""
    try:
        return _dims(run, world_size)
    except ValueError:
        return None


def stages_per_rank(run: Config) -> int:
    """Stages of a pipeline that one rank holds."""
    return 2 if run.get("strategy.schedule") == "interleaved_1f1b" else 1


def divisors(number: int) -> str:
    """All divisors of a number, as one writes them."""
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return ", ".join(map(str, sorted({*small, *(number // i for i in small)})))


def _dims(run: Config, world_size: int) -> ParallelDims:
    options = run.values["strategy"]
    sizes = (options.get(f"{axis}_parallel_size") for axis in ("tensor", "pipeline"))
    return parallel_dims(options["name"], world_size, *sizes)


def _check_dims(run: Config, world_size: int) -> Iterator[Problem]:
    name = run.get("strategy.name")
    if name not in STRATEGIES or (name == "single" and world_size > 1):
        return None  # told by itself
    for axis in ("tensor", "pipeline"):
        key = f"strategy.{axis}_parallel_size"
        size = _at(run.values, key)  # also one that does not fit the model
        if isinstance(size, int) and size > 0 and world_size % size:
            allowed = divisors(world_size)
            yield run.error(key, f"does not divide {world_size} ranks", allowed=allowed)
            return None
    if any(key.startswith("strategy.") for key in run.wrong):
        return None
    try:
        dims = _dims(run, world_size)
    except ValueError as error:
        size = next(
            (axis for axis in ("tensor", "pipeline") if run.get(f"strategy.{axis}_parallel_size")),
            None,
        )
        words = str(error).partition(": ")[2]
        yield Problem(f"strategy.{size}_parallel_size" if size else "strategy", None, words)
        return None
    if run.get("model._target_") == SIMPLE_GPT:
        heads, layers = run.get("model.n_heads"), run.get("model.n_layers")
        if heads and heads % dims.tensor:
            wrong = f"{dims.tensor} ranks do not divide model.n_heads={heads}"
            allowed = divisors(math.gcd(heads, world_size))
            yield run.error("strategy.tensor_parallel_size", wrong, allowed=allowed)
        stages = dims.pipeline * stages_per_rank(run)
        if layers and stages > layers:
            wrong = f"{stages} stages, but model.n_layers={layers}: each holds at least one"
            yield run.error("strategy.pipeline_parallel_size", wrong)
    return dims


def _check_steps(run: Config, batch: BatchPlan, n_samples: int) -> Iterator[Problem]:
    epoch_steps = batch.steps_per_epoch(n_samples)
    if not epoch_steps:
        wrong = f"{n_samples} sequences, one step needs {batch.global_batch_size}"
        attempt = "a smaller data.batch_size or data.global_batch_size"
        yield run.error("data.train.num_samples", wrong, attempt)
        return
    length, asked = run.get("data.train.seq_len"), run.get("max_tokens")
    step_tokens = batch.global_batch_size * ((length or 1) - 1)
    if asked and asked < step_tokens:
        yield run.error("max_tokens", f"less than the {step_tokens} tokens of one step")
    trainer, total = run.values["trainer"], run.get("scheduler.total_steps")
    if asked or trainer["fast_dev_run"] or trainer["limit_train_batches"] is not None:
        return
    if run.wrong & {"trainer.max_epochs", "trainer.max_steps", "trainer.max_time"}:
        return
    steps = run_steps(epoch_steps, effective_max_epochs(trainer, None), trainer["max_steps"])
    if steps and total and total < steps:
        wrong = f"shorter than the run of {steps} steps, the rest runs at the minimum learning rate"
        yield run.warning("scheduler.total_steps", wrong, "scheduler.total_steps=null")
    if steps and not total and run.get("scheduler.warmup_steps", 0) > steps:
        yield run.warning("scheduler.warmup_steps", f"longer than the run of {steps} steps")
    every = trainer["val_check_interval"]
    if steps and isinstance(every, int) and every > steps:
        wrong = f"longer than the run of {steps} steps, it is validated at its end only"
        yield run.warning("trainer.val_check_interval", wrong)


def _resolve(cfg: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Plain values; a key that cannot be resolved is null, and a problem."""
    problems = []
    for key in [key for key, value in _leaves(OmegaConf.to_container(cfg)) if value == "???"]:
        problems.append(Problem(key, None, "required and not set", attempt=f"{key}=<value>"))
        OmegaConf.update(cfg, key, None)
    while True:
        try:
            return OmegaConf.to_container(cfg, resolve=True), problems
        except (OmegaConfBaseException, RecursionError) as error:
            key = getattr(error, "full_key", None)
            if key is None:
                problems.append(Problem("", None, "a reference leads to itself"))
                return {}, problems
            raw, words = _at(OmegaConf.to_container(cfg), key), str(error).splitlines()[0]
            problems.append(Problem(key, show(raw), f"cannot be resolved: {words}"))
            OmegaConf.update(cfg, key, None)


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _at(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node

"""What must fit together in a config, known without torch and without looking at the machine.

A rule is one `if wrong: yield Problem(...)`. `run.get` gives None for a key that was found wrong,
so that no mistake is told twice. Rules about `model.*` hold for the nets that ship.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gptrain.config.compose import plain
from gptrain.config.data_schema import DATA, DUMMY
from gptrain.config.schema import NETS, STRATEGIES, Run
from gptrain.config.values import find_wrong_values, walk
from gptrain.lengths import effective_max_epochs, plan_batch, run_steps
from gptrain.parallel.dims import ANY_NET, STAGES_PER_RANK, count_microbatches, parallel_dims
from gptrain.problems import BAD_CONFIG, DONE, Problem, first_line, show
from gptrain.ranks.process import count_devices, count_nodes, this_process

DECAYING = {f"gptrain.optim.warmup_{way}" for way in ("cosine", "linear", "stable_decay")}
FP16 = ("16-mixed", 16, "16", "16-true")  # scaled losses, or weights in fp16
AXIS_SIZES = ("strategy.tensor_parallel_size", "strategy.pipeline_parallel_size")
LIMITS = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")


@dataclass
class Config:
    """A config as plain values, every reference resolved, and what was found wrong with it."""

    values: dict[str, Any]
    schema: type[Run] = Run
    problems: list[Problem] = field(default_factory=list)

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.code != DONE]

    @property
    def wrong(self) -> set[str]:
        """Keys that an error has named."""
        return {problem.key for problem in self.errors} - {""}

    @cached_property
    def flat(self) -> dict[str, Any]:
        return dict(walk(self.values))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; `default` where it is absent, null, or was found wrong."""
        is_wrong = any(f"{key}.".startswith(f"{wrong}.") for wrong in self.wrong)
        found = None if is_wrong else self.flat.get(key)
        return default if found is None else found

    def add(self, found: Iterator[Problem]) -> None:
        """Keeps one error a key."""
        for problem in found:
            if problem.key not in self.wrong:
                self.problems.append(problem)

    def error(
        self, key: str, wrong: str, attempt: str = "", allowed: str = "", code: int = BAD_CONFIG
    ) -> Problem:
        """A problem of a key, with its value."""
        return Problem(key, show(self.flat.get(key)), wrong, allowed, attempt, code)


def check_config(cfg: DictConfig, schema: type[Run] = Run) -> Config:
    """Everything that is wrong with a config by itself. Hydra's own node is not looked at."""
    try:
        run = Config(plain(cfg, resolve=True), schema)
    except (OmegaConfBaseException, RecursionError) as error:
        is_unset = isinstance(error, MissingMandatoryValue)
        wrong = "required and not set" if is_unset else f"cannot be resolved: {first_line(error)}"
        key = getattr(error, "full_key", None) or ""
        return Config({}, schema, [Problem(key, None, wrong)])
    run.add(find_wrong_values(run.values, schema))
    for rule in (check_sizes, check_length, check_strategy, check_start):
        run.add(rule(run))
    if (world_size := find_world_size(run)) is not None:
        run.add(check_world(run, world_size))
    return run


def find_world_size(run: Config) -> int | None:
    """Ranks of the whole job, where the config or a launcher says it."""
    n_local, asked = count_devices(run.get("trainer.devices")), run.get("trainer.num_nodes")
    if this_process().is_rank:
        return this_process().world_size
    return n_local * count_nodes(asked) if n_local and asked else None


def check_sizes(run: Config) -> Iterator[Problem]:
    """The sizes of a net that ships, and of the data that it is trained on."""
    if run.get("model._target_") not in NETS:
        return
    width, heads = run.get("model.d_model"), run.get("model.n_heads")
    pair = 2 if "rope_base" in run.values["model"] else 1  # a head's numbers turn in pairs
    if width and heads and width % (pair * heads):
        step, by = pair * heads, "2 x " * (pair - 1) + f"model.n_heads={heads}"
        near = ", ".join(str(n) for n in (width // step * step, (width // step + 1) * step) if n)
        yield run.error("model.d_model", f"not divisible by {by}; nearest: {near}")
    if heads and (shared := run.get("model.n_kv_heads")) and heads % shared:
        wrong = f"does not divide model.n_heads={heads}"
        yield run.error("model.n_kv_heads", wrong, allowed=divisors(heads))
    target, length = run.get("data.train._target_"), run.get("data.seq_len")
    longest, vocabulary = run.get("model.max_seq_len"), run.get("model.vocab_size")
    if target not in DATA:
        return  # what the keys of other data mean is theirs
    positions = (length or 0) - (target == DUMMY)  # the last token of its samples is a target only
    if longest and positions > longest:
        wrong = f"longer than model.max_seq_len={longest}"
        attempt = f"data.seq_len={longest} or model.max_seq_len={positions}"
        yield run.error("data.seq_len", wrong, attempt)
    tokenizer = run.get("data.tokenizer")
    if vocabulary and vocabulary < 256 and tokenizer in ("bytes", "bpe"):
        wrong = f"data.tokenizer={tokenizer} has at least the 256 bytes"
        yield run.error("model.vocab_size", wrong, "model.vocab_size=256")


def check_length(run: Config) -> Iterator[Problem]:
    """What ends the run, and a schedule that needs to know when."""
    for phase in ("warmup", "decay", "total"):
        key, asked = f"scheduler.{phase}_steps", run.get(f"scheduler.{phase}_steps")
        if asked is not None and run.get(f"scheduler.{phase}_tokens"):
            wrong = f"excludes {key}={asked}: they say the same"
            yield run.error(f"scheduler.{phase}_tokens", wrong, f"{key}=null")
    for unit in ("steps", "tokens"):
        key, total = f"scheduler.warmup_{unit}", run.get(f"scheduler.total_{unit}")
        if total and run.get(key, 0) > total:
            wrong = f"must be <= scheduler.total_{unit}={total}"
            yield run.error(key, wrong, f"{key}={int(total // 10)}")
    total = run.get("scheduler.total_steps") or run.get("scheduler.total_tokens")
    steps, tokens = run.get("trainer.max_steps", -1), run.get("max_tokens")
    if tokens and steps != -1:
        wrong = f"excludes trainer.max_steps={steps}: both end the run"
        yield run.error("max_tokens", wrong, "trainer.max_steps=-1, or max_tokens=null")
    if run.get("task") != "fit" or run.get("trainer.fast_dev_run"):
        return
    if run.wrong & {*LIMITS, "max_tokens", "trainer"}:
        return
    trainer = run.values["trainer"]
    if steps != -1 or tokens or effective_max_epochs(trainer, tokens) is not None:
        return
    if trainer["max_time"] is None:
        wrong = f"no stop condition: set one of {', '.join(LIMITS)}"
        yield Problem("", None, wrong, attempt="trainer.max_epochs=3")
    elif run.get("scheduler._target_") in DECAYING and total is None:
        wrong = "this schedule decays over a run whose length in steps trainer.max_time hides"
        attempt = "scheduler=warmup_constant, or scheduler.total_steps=<steps>"
        yield run.error("scheduler.total_steps", wrong, attempt)


def check_strategy(run: Config) -> Iterator[Problem]:
    """Strategy against devices, precision and compilation."""
    name, precision = run.get("strategy.name"), run.get("trainer.precision")
    if run.get("trainer.accelerator") == "cpu":
        yield from check_cpu(run)
    if name not in STRATEGIES or name in ("auto", "single", "ddp"):
        return
    if precision in FP16:
        wrong = f"strategy={name} does not scale losses"
        yield run.error("trainer.precision", wrong, "trainer.precision=bf16-mixed")
    if name not in ANY_NET and run.get("model.compile") == "model":
        wrong = f"under strategy={name} collectives and hooks lie between the blocks"
        yield run.error("model.compile", wrong, "model.compile=blocks")
    recomputes = run.get("model.activation_checkpointing", "none") != "none"
    if "tensor" in name and recomputes and run.get("model.compile", "none") != "none":
        wrong = f"under strategy={name} torch cannot compile what is recomputed of sharded weights"
        yield run.error("model.compile", wrong, "model.activation_checkpointing=none")


def check_cpu(run: Config) -> Iterator[Problem]:
    """What no CPU can do."""
    precision = run.get("trainer.precision")
    if precision in FP16 or str(precision).startswith("transformer-engine"):
        yield run.error("trainer.precision", "not supported on CPU", "trainer.precision=bf16-mixed")
    if run.get("strategy.backend") == "nccl":
        yield run.error("strategy.backend", "nccl needs GPUs", "strategy.backend=gloo")


def check_start(run: Config) -> Iterator[Problem]:
    """Where the run starts from."""
    if run.get("ckpt_path") and run.get("init_from"):
        wrong = "excludes ckpt_path: fresh weights or an exact resume, not both"
        yield run.error("init_from", wrong)
    starts = any(run.get(key) for key in ("ckpt_path", "init_from", "from_run"))
    if run.get("task", "fit") != "fit" and not starts and not run.get("trainer.fast_dev_run"):
        wrong = "no ckpt_path: it measures initial weights"
        yield run.error("task", wrong, "ckpt_path=best", code=DONE)


def check_world(run: Config, world_size: int) -> Iterator[Problem]:
    """How so many ranks share the work: sizes, batch and steps."""
    name = run.get("strategy.name")
    if name not in STRATEGIES or any(key.startswith("strategy.") for key in run.wrong):
        return
    try:
        dims = parallel_dims(run.values["strategy"], world_size)
    except ValueError as error:
        yield run.error(next(filter(run.get, AXIS_SIZES), "trainer.devices"), str(error))
        return
    if world_size == 1 and name not in ("auto", "single"):
        attempt = "trainer.devices=2"
        yield Problem("strategy", name, "no effect on one device", attempt=attempt, code=DONE)
    if run.get("model._target_") in NETS:
        yield from _check_split(run, dims.tensor, dims.pipeline)
    if dims.data % dims.replicas:
        wrong = f"does not divide the {dims.data} data-parallel ranks"
        yield run.error("strategy.replicas", wrong, allowed=divisors(dims.data))
    if "pipeline" in name:
        yield from _check_microbatches(run, dims.pipeline)
    yield from _check_steps(run, dims.data)


def divisors(number: int) -> str:
    """All divisors of a number, as one writes them."""
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return ", ".join(map(str, sorted({*small, *(number // i for i in small)})))


def _check_split(run: Config, tensor: int, pipeline: int) -> Iterator[Problem]:
    layers = run.get("model.n_layers")
    for key in ("model.n_kv_heads", "model.n_heads"):
        if (heads := run.get(key)) and heads % tensor:
            wrong = f"does not divide {key}={heads}, a rank must hold whole heads"
            yield run.error("strategy.tensor_parallel_size", wrong, allowed=divisors(heads))
    stages = pipeline * STAGES_PER_RANK.get(run.get("strategy.schedule"), 1)
    if layers and stages > layers:
        wrong = f"{stages} stages, but model.n_layers={layers}: each holds at least one"
        yield run.error("strategy.pipeline_parallel_size", wrong)


def _check_microbatches(run: Config, stages: int) -> Iterator[Problem]:
    batch, schedule = run.get("data.batch_size"), run.get("strategy.schedule")
    micro = count_microbatches(run.get("strategy.microbatches"), stages)
    if batch and batch % micro:
        wrong = f"not divisible into {micro} microbatches"
        attempt = f"data.batch_size={micro * max(1, batch // micro)}"
        yield run.error("data.batch_size", wrong, attempt)
    attempt = f"strategy.microbatches={2 * stages}, or strategy.schedule=gpipe"
    if schedule == "1f1b" and micro < stages:
        wrong = f"1f1b needs at least one microbatch per stage ({stages})"
        yield run.error("strategy.microbatches", wrong, attempt)
    if schedule == "interleaved_1f1b" and micro % stages:
        wrong = f"interleaved_1f1b needs equally many microbatches per stage ({stages})"
        yield run.error("strategy.microbatches", wrong, attempt)


def _check_steps(run: Config, n_data: int) -> Iterator[Problem]:
    size, accumulate = run.get("data.batch_size"), run.get("trainer.accumulate_grad_batches")
    if not size or not accumulate or "data.global_batch_size" in run.wrong:
        return
    try:
        batch = plan_batch(size, run.get("data.global_batch_size"), accumulate, n_data)
    except ValueError as error:
        yield run.error("data.global_batch_size", str(error))
        return
    if batch.accumulate > 1 and run.get("strategy.static_graph"):
        wrong = "torch keeps no static graph over the micro-steps of an accumulation (2.13)"
        yield run.error("strategy.static_graph", wrong, "strategy.static_graph=false")
    is_dummy = run.get("data.train._target_") == DUMMY  # of other data the length is read later
    n_samples = run.get("data.num_samples") if is_dummy else None
    if run.get("task") != "fit":
        return
    epoch_steps = batch.steps_per_epoch(n_samples) if n_samples else None
    if epoch_steps == 0:
        wrong = f"{n_samples} sequences, one step needs {batch.global_batch_size}"
        attempt = "a smaller data.batch_size or data.global_batch_size"
        yield run.error("data.num_samples", wrong, attempt)
    trainer, warmup = run.values["trainer"], run.get("scheduler.warmup_steps", 0)
    ends_early = run.get("max_tokens") or run.get("trainer.fast_dev_run")
    if run.wrong & {*LIMITS, "trainer"} or ends_early:
        return
    epochs = effective_max_epochs(trainer, None) if epoch_steps else None
    steps = run_steps(epoch_steps or 0, epochs, trainer["max_steps"])
    if steps and warmup > steps and not run.get("scheduler.total_steps"):
        wrong = f"longer than the run of {steps} steps"
        yield run.error("scheduler.warmup_steps", wrong, code=DONE)

"""What must fit together in a config, known without torch and without looking at the machine.

A rule is one `if …: yield checked.error(...)`. A key that was found wrong is None in `checked.run`,
so that no mistake is reported twice. Rules about `model.*` hold for the nets that ship.
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
from gptrain.config.values import read_config, walk
from gptrain.core.data_schema import DATA, DummyTextConfig
from gptrain.core.errors import BAD_CONFIG, DONE, ConfigIssue, first_line, show
from gptrain.core.lengths import effective_max_epochs, plan_batch, run_steps
from gptrain.core.schema import DecoderConfig, LlamaConfig, RunConfig
from gptrain.core.strategies import (
    ANY_NET,
    PIPELINE,
    STAGES_PER_RANK,
    STRATEGIES,
    TENSOR,
    DDPOptions,
    PipelineOptions,
    count_microbatches,
    parallel_dims,
)
from gptrain.runtime.process import count_devices, count_nodes, this_process

DECAYING = {f"gptrain.optim.warmup_{way}" for way in ("cosine", "linear", "stable_decay")}
FP16 = ("16-mixed", 16, "16", "16-true")  # scaled losses, or weights in fp16
LIMITS = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")


@dataclass
class CheckedConfig:
    """A config and what was found wrong with it.

    Attributes:
        run: The typed config. If there are problems, wrong and missing values are None in it.
        values: The same config as nested dicts, with all references resolved.
        schema: Type of the config.
    """

    run: RunConfig
    values: dict[str, Any]
    schema: type[RunConfig] = RunConfig
    problems: list[ConfigIssue] = field(default_factory=list)

    @property
    def errors(self) -> list[ConfigIssue]:
        """Problems that are not only warnings."""
        return [problem for problem in self.problems if problem.code != DONE]

    @property
    def wrong_keys(self) -> set[str]:
        """Keys that an error has named."""
        return {problem.key for problem in self.errors} - {""}

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The value of each dotted key."""
        return dict(walk(self.values))

    def is_wrong(self, *keys: str) -> bool:
        """Return whether an error has named one of the keys or a group that holds it."""
        return any(
            f"{key}.".startswith(f"{message}.") for key in keys for message in self.wrong_keys
        )

    def add(self, found: Iterator[ConfigIssue]) -> None:
        """Keep one error for each key."""
        for problem in found:
            if problem.key not in self.wrong_keys:
                self.problems.append(problem)

    def error(
        self, key: str, message: str, hint: str = "", allowed: str = "", code: int = BAD_CONFIG
    ) -> ConfigIssue:
        """Return a problem of a key, with the value of the key."""
        return ConfigIssue(key, show(self.flat.get(key)), message, allowed, hint, code)


def check_config(cfg: DictConfig, schema: type[RunConfig] = RunConfig) -> CheckedConfig:
    """Return the typed config and everything that is wrong with it by itself.

    Hydra's own node is left out.
    """
    try:
        values = plain(cfg, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        is_unset = isinstance(error, MissingMandatoryValue)
        message = "required and not set" if is_unset else f"cannot be resolved: {first_line(error)}"
        key = getattr(error, "full_key", None) or ""
        nothing, _ = read_config({}, schema)
        return CheckedConfig(nothing, {}, schema, [ConfigIssue(key, None, message)])
    run, problems = read_config(values, schema)
    checked = CheckedConfig(run, values, schema)
    checked.add(iter(problems))
    for rule in (check_sizes, check_length, check_strategy, check_start):
        checked.add(rule(checked))
    if (world_size := find_world_size(run)) is not None:
        checked.add(check_world(checked, world_size))
    return checked


def find_world_size(run: RunConfig) -> int | None:
    """Return the number of ranks of the whole job if the config or a launcher says it."""
    n_local, asked = count_devices(run.trainer.devices), run.trainer.num_nodes
    if this_process().is_rank:
        return this_process().world_size
    return n_local * count_nodes(asked) if n_local and asked else None


def check_sizes(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Check the sizes of a net that ships, and of the data that it is trained on."""
    model, data = checked.run.model, checked.run.data
    if not isinstance(model, DecoderConfig):
        return
    width, heads, is_llama = model.d_model, model.n_heads, isinstance(model, LlamaConfig)
    pair = 2 if is_llama else 1  # rotary positions turn the features of a head in pairs
    if width and heads and width % (pair * heads):
        step, by = pair * heads, "2 x " * (pair - 1) + f"model.n_heads={heads}"
        near = ", ".join(str(n) for n in (width // step * step, (width // step + 1) * step) if n)
        yield checked.error("model.d_model", f"not divisible by {by}; nearest: {near}")
    if isinstance(model, LlamaConfig) and heads and (shared := model.n_kv_heads) and heads % shared:
        message = f"does not divide model.n_heads={heads}"
        yield checked.error("model.n_kv_heads", message, allowed=divisors(heads))
    if data.train.target not in DATA:
        return  # the keys of other data have a meaning of their own
    longest, vocabulary, positions = model.max_seq_len, model.vocab_size, data.sample_tokens or 0
    if longest and positions > longest:
        message = f"longer than model.max_seq_len={longest}"
        hint = f"data.seq_len={longest} or model.max_seq_len={positions}"
        yield checked.error("data.seq_len", message, hint)
    tokenizer = data.extra.get("tokenizer")
    if vocabulary and vocabulary < 256 and tokenizer in ("bytes", "bpe"):
        message = f"data.tokenizer={tokenizer} has at least the 256 bytes"
        yield checked.error("model.vocab_size", message, "model.vocab_size=256")


def check_length(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Check what ends the run, and a schedule that needs to know when."""
    run, trainer, scheduler = checked.run, checked.run.trainer, checked.run.scheduler
    for name in ("warmup", "decay", "total"):
        phase = scheduler.phase(name)
        if phase.steps is not None and phase.tokens:
            key = f"scheduler.{name}_steps"
            message = f"excludes {key}={show(checked.flat.get(key))}: they say the same"
            yield checked.error(f"scheduler.{name}_tokens", message, f"{key}=null")
    warmup, total = scheduler.phase("warmup"), scheduler.phase("total")
    for unit, asked, most in (
        ("steps", warmup.steps, total.steps),
        ("tokens", warmup.tokens, total.tokens),
    ):
        if most and (asked or 0) > most:
            key = f"scheduler.warmup_{unit}"
            message = f"must be <= scheduler.total_{unit}={show(most)}"
            yield checked.error(key, message, f"{key}={int(most // 10)}")
    is_total_given = bool(total.steps or total.tokens)
    steps, tokens = -1 if trainer.max_steps is None else trainer.max_steps, run.max_tokens
    if tokens and steps != -1:
        message = f"excludes trainer.max_steps={steps}: both end the run"
        yield checked.error("max_tokens", message, "trainer.max_steps=-1, or max_tokens=null")
    if run.task != "fit" or trainer.fast_dev_run:
        return
    if checked.wrong_keys & {*LIMITS, "max_tokens", "trainer"}:
        return
    if steps != -1 or tokens or effective_max_epochs(trainer, tokens) is not None:
        return
    if trainer.max_time is None:
        message = f"no stop condition: set one of {', '.join(LIMITS)}"
        yield ConfigIssue("", None, message, hint="trainer.max_epochs=3")
    elif scheduler.target in DECAYING and not is_total_given:
        message = "this schedule decays over a run of unknown length: trainer.max_time ends it"
        hint = "scheduler=warmup_constant, or scheduler.total_steps=<steps>"
        yield checked.error("scheduler.total_steps", message, hint)


def check_strategy(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Check the strategy against devices, precision and compilation."""
    run = checked.run
    name, precision = run.strategy.name, run.trainer.precision
    if run.trainer.accelerator == "cpu":
        yield from check_cpu(checked)
    if name not in STRATEGIES or name in ("auto", "single", "ddp"):
        return
    if precision in FP16:
        message = f"strategy={name} does not scale losses"
        yield checked.error("trainer.precision", message, "trainer.precision=bf16-mixed")
    if name not in ANY_NET and run.model.compile == "model":
        message = f"under strategy={name} collectives and hooks lie between the blocks"
        yield checked.error("model.compile", message, "model.compile=blocks")
    recomputes = (run.model.activation_checkpointing or "none") != "none"
    if "tensor" in name and recomputes and (run.model.compile or "none") != "none":
        message = (
            f"under strategy={name} torch cannot compile what is recomputed of sharded weights"
        )
        yield checked.error("model.compile", message, "model.activation_checkpointing=none")


def check_cpu(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Check for options that no CPU supports."""
    precision, backend = checked.run.trainer.precision, checked.run.strategy.backend
    if precision in FP16 or str(precision).startswith("transformer-engine"):
        hint = "trainer.precision=bf16-mixed"
        yield checked.error("trainer.precision", "not supported on CPU", hint)
    if backend == "nccl":
        yield checked.error("strategy.backend", "nccl needs GPUs", "strategy.backend=gloo")


def check_start(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Check where the run starts from."""
    run = checked.run
    if run.ckpt_path and run.init_from:
        message = "excludes ckpt_path: fresh weights or an exact resume, not both"
        yield checked.error("init_from", message)
    starts = run.ckpt_path or run.init_from or run.from_run
    if (run.task or "fit") != "fit" and not starts and not run.trainer.fast_dev_run:
        message = "no ckpt_path: it measures initial weights"
        yield checked.error("task", message, "ckpt_path=best", code=DONE)


def check_world(checked: CheckedConfig, world_size: int) -> Iterator[ConfigIssue]:
    """Check how so many ranks share the work: sizes, batch and steps."""
    run, options = checked.run, checked.run.strategy
    name = options.name
    if name not in ("auto", *STRATEGIES) or any(
        key.startswith("strategy.") for key in checked.wrong_keys
    ):
        return
    try:
        dims = parallel_dims(options, world_size)
    except ValueError as error:
        given = (axis for axis in (TENSOR, PIPELINE) if options.axis_size(axis))
        key = next((f"strategy.{axis}_parallel_size" for axis in given), "trainer.devices")
        yield checked.error(key, str(error))
        return
    if world_size == 1 and name not in ("auto", "single"):
        hint = "trainer.devices=2"
        yield ConfigIssue("strategy", name, "no effect on one device", hint=hint, code=DONE)
    if isinstance(run.model, DecoderConfig):
        yield from _check_split(checked, dims.tensor, dims.pipeline)
    if dims.data % dims.replicas:
        message = f"does not divide the {dims.data} data-parallel ranks"
        yield checked.error("strategy.replicas", message, allowed=divisors(dims.data))
    if isinstance(options, PipelineOptions):
        yield from _check_microbatches(checked, options, dims.pipeline)
    yield from _check_steps(checked, dims.data)


def divisors(number: int) -> str:
    """Return all divisors of a number, joined by commas."""
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return ", ".join(map(str, sorted({*small, *(number // i for i in small)})))


def _check_split(checked: CheckedConfig, tensor: int, pipeline: int) -> Iterator[ConfigIssue]:
    model, options = checked.run.model, checked.run.strategy
    heads = {}
    if isinstance(model, LlamaConfig):
        heads["model.n_kv_heads"] = model.n_kv_heads
    if isinstance(model, DecoderConfig):
        heads["model.n_heads"] = model.n_heads
    for key, n_heads in heads.items():
        if n_heads and n_heads % tensor:
            message = f"does not divide {key}={n_heads}, a rank must hold whole heads"
            allowed = divisors(n_heads)
            yield checked.error("strategy.tensor_parallel_size", message, allowed=allowed)
    is_interleaved = isinstance(options, PipelineOptions)
    stages = pipeline * (STAGES_PER_RANK[options.schedule] if is_interleaved else 1)
    layers = model.n_layers if isinstance(model, DecoderConfig) else None
    if layers and stages > layers:
        message = f"{stages} stages, but model.n_layers={layers}: each holds at least one"
        yield checked.error("strategy.pipeline_parallel_size", message)


def _check_microbatches(
    checked: CheckedConfig, options: PipelineOptions, stages: int
) -> Iterator[ConfigIssue]:
    batch, schedule = checked.run.data.batch_size, options.schedule
    micro = count_microbatches(options.microbatches, stages)
    if batch and batch % micro:
        message = f"not divisible into {micro} microbatches"
        hint = f"data.batch_size={micro * max(1, batch // micro)}"
        yield checked.error("data.batch_size", message, hint)
    hint = f"strategy.microbatches={2 * stages}, or strategy.schedule=gpipe"
    if schedule == "1f1b" and micro < stages:
        message = f"1f1b needs at least one microbatch per stage ({stages})"
        yield checked.error("strategy.microbatches", message, hint)
    if schedule == "interleaved_1f1b" and micro % stages:
        message = f"interleaved_1f1b needs equally many microbatches per stage ({stages})"
        yield checked.error("strategy.microbatches", message, hint)


def _check_steps(checked: CheckedConfig, n_data: int) -> Iterator[ConfigIssue]:
    run, data, trainer = checked.run, checked.run.data, checked.run.trainer
    size, accumulate = data.batch_size, trainer.accumulate_grad_batches
    if not size or not accumulate or "data.global_batch_size" in checked.wrong_keys:
        return
    try:
        batch = plan_batch(size, data.global_batch_size, accumulate, n_data)
    except ValueError as error:
        yield checked.error("data.global_batch_size", str(error))
        return
    is_static = isinstance(run.strategy, DDPOptions) and run.strategy.static_graph
    if batch.accumulate > 1 and is_static:
        message = "torch keeps no static graph over the micro-steps of an accumulation (2.13)"
        yield checked.error("strategy.static_graph", message, "strategy.static_graph=false")
    # The length of other data is read later.
    n_samples = data.num_samples if isinstance(data, DummyTextConfig) else None
    if run.task != "fit":
        return
    epoch_steps = batch.steps_per_epoch(n_samples) if n_samples else None
    if epoch_steps == 0:
        message = f"{n_samples} sequences, one step needs {batch.global_batch_size}"
        hint = "a smaller data.batch_size or data.global_batch_size"
        yield checked.error("data.num_samples", message, hint)
    ends_early = run.max_tokens or trainer.fast_dev_run
    if checked.wrong_keys & {*LIMITS, "trainer"} or ends_early:
        return
    epochs = effective_max_epochs(trainer, None) if epoch_steps else None
    steps = run_steps(epoch_steps or 0, epochs, trainer.max_steps)
    warmup = run.scheduler.warmup_steps
    if steps and warmup and warmup > steps and not run.scheduler.total_steps:
        message = f"longer than the run of {steps} steps"
        yield checked.error("scheduler.warmup_steps", message, code=DONE)

"""Rules about values of a config that must fit together.

The rules need neither torch nor the machine that will run the job. A rule is a generator with one
`if ...: yield checked.error(...)` per mistake. The types of all values were validated before. Rules
about the sizes of a net apply only to the decoders that ship with gptrain.

A function `check_...` is a rule: `check_config` applies the rules in order, and `preflight` applies
two of them again when it knows the devices. A function `_check_...` is a part of a rule.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gptrain.config.compose import typed
from gptrain.core.data_schema import DATA, DataModuleConfig, DummyTextConfig
from gptrain.core.errors import BAD_CONFIG, DONE, ConfigIssue, show
from gptrain.core.lengths import effective_max_epochs, run_steps
from gptrain.core.precision import find_precision
from gptrain.core.schema import DecayConfig, DecoderConfig, RunConfig
from gptrain.core.small_files import walk
from gptrain.core.strategies import (
    CONTEXT,
    PIPELINE,
    TENSOR,
    DDPOptions,
    ParallelDims,
    PipelineOptions,
    count_microbatches,
    divisors,
    find_strategy,
    parallel_dims,
)
from gptrain.runtime.process import count_devices, count_nodes, this_process

TOKEN_PHASES = tuple(f"scheduler.{name}_tokens" for name in ("warmup", "decay", "total"))
LIMITS = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")


@dataclass
class CheckedConfig:
    """A config and the problems that the checks found in it.

    `add` runs a rule and keeps its problems, but of each key only the first error. A rule is a
    generator that runs while its problems are added: after a `yield`, `wrong_keys` contains the
    error that the rule has just found.

    Attributes:
        run: Typed config.
        values: The same config as nested dicts, with all references resolved.
        schema: Type of the config.
        problems: Errors and warnings, in the order in which they were found.
    """

    run: RunConfig
    values: dict[str, Any]
    schema: type[RunConfig] = RunConfig
    problems: list[ConfigIssue] = field(default_factory=list)

    @property
    def errors(self) -> list[ConfigIssue]:
        """Problems that stop the run, without the warnings."""
        return [problem for problem in self.problems if problem.code != DONE]

    @property
    def wrong_keys(self) -> set[str]:
        """Dotted keys of all errors so far. Warnings are not included."""
        return {problem.key for problem in self.errors} - {""}

    @cached_property
    def flat(self) -> dict[str, Any]:
        """Value of each dotted key. The key of a group has the dict of the group as its value."""
        return dict(walk(self.values))

    def add(self, problems: Iterable[ConfigIssue]) -> None:
        """Append problems to `problems`, except those of keys that have an error already.

        Args:
            problems: Problems that a rule has found, usually the generator of the rule.
        """
        for problem in problems:
            if problem.key not in self.wrong_keys:
                self.problems.append(problem)

    def error(
        self, key: str, message: str, hint: str = "", allowed: str = "", code: int = BAD_CONFIG
    ) -> ConfigIssue:
        """Return a problem of a key, with the value that the key has in the config.

        Args:
            key: Dotted key. A key without a value is shown as null.
            message: Reason why the value is wrong.
            hint: Override or command to type instead.
            allowed: Values that are allowed.
            code: Exit code. DONE (0) makes the problem a warning.
        """
        return ConfigIssue(key, show(self.flat.get(key)), message, allowed, hint, code)


def check_config(values: dict[str, Any], schema: type[RunConfig] = RunConfig) -> CheckedConfig:
    """Validate a config and apply all rules that need neither torch nor the machine of the job.

    Args:
        values: Config as nested dicts, with all references resolved and without Hydra's own node,
            as `gptrain.config.compose.plain` returns it.
        schema: Type of the config.

    Returns:
        The typed config together with its problems, both errors and warnings.

    Raises:
        ConfigError: If a value has a wrong type, or the environment variables of a launcher
            contradict each other. Broken rules are not raised.
    """
    checked = CheckedConfig(typed(values, schema), values, schema)
    for rule in (check_sizes, check_data_module, check_length, check_strategy, check_start):
        checked.add(rule(checked))
    if (world_size := find_world_size(checked.run)) is not None:
        checked.add(check_world(checked, world_size))
    return checked


def find_world_size(run: RunConfig) -> int | None:
    """Return the number of ranks of the job, or None if it depends on the devices of the machine.

    If a launcher such as torchrun started this process, its number of ranks takes precedence over
    `trainer.devices` and `trainer.num_nodes`.

    Args:
        run: Config of the run.

    Raises:
        ConfigError: If the environment variables of a launcher contradict each other.
    """
    if this_process().is_rank:
        return this_process().world_size
    n_local = count_devices(run.trainer.devices)
    num_nodes = run.trainer.num_nodes
    return n_local * count_nodes(num_nodes) if n_local and num_nodes else None


def check_sizes(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each size of a shipped net that does not fit another size or the data.

    Yields nothing for a net that does not ship with gptrain. The data are not compared if their
    group is not one of those that ship with gptrain.
    """
    model, data = checked.run.model, checked.run.data
    if not isinstance(model, DecoderConfig):
        return
    sizes = model.arguments
    yield from _check_width(checked, sizes)
    n_heads, n_kv_heads = model.n_heads, sizes.get("n_kv_heads")
    if n_heads and n_kv_heads and n_heads % n_kv_heads:
        message = f"does not divide model.n_heads={n_heads}"
        yield checked.error("model.n_kv_heads", message, allowed=divisors(n_heads))
    if isinstance(data, DataModuleConfig) or data.train.target not in DATA:
        return  # seq_len and tokenizer of a user's data group may have another meaning
    positions = data.sample_tokens or 0
    if model.max_seq_len and positions > model.max_seq_len:
        message = f"longer than model.max_seq_len={model.max_seq_len}"
        hint = f"data.seq_len={model.max_seq_len} or model.max_seq_len={positions}"
        yield checked.error("data.seq_len", message, hint)
    tokenizer = data.extra.get("tokenizer")
    if model.vocab_size and model.vocab_size < 256 and tokenizer in ("bytes", "bpe"):
        message = f"data.tokenizer={tokenizer} has at least 256 tokens, one per byte"
        yield checked.error("model.vocab_size", message, "model.vocab_size=256")


def _check_width(checked: CheckedConfig, sizes: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Yield a problem if the width of a decoder cannot be divided into heads.

    A net with the key `rope_base` rotates pairs of features of a head, so the width of a head must
    be even. The key `d_head` sets this width, whatever `d_model` is.

    Args:
        checked: Config to check.
        sizes: Keys of the net. An invalid value is None.
    """
    is_rotary = "rope_base" in sizes
    width, n_heads, d_head = sizes["d_model"], sizes["n_heads"], sizes.get("d_head")
    if d_head:
        if is_rotary and d_head % 2:
            message = f"odd, but RoPE rotates pairs; nearest: {d_head - 1}, {d_head + 1}"
            yield checked.error("model.d_head", message)
        return
    if not width or not n_heads:
        return
    divisor = 2 * n_heads if is_rotary else n_heads
    if width % divisor:
        below = width // divisor * divisor
        near = ", ".join(str(size) for size in (below, below + divisor) if size)
        factor = "2 x " if is_rotary else ""
        message = f"not divisible by {factor}model.n_heads={n_heads}; nearest: {near}"
        yield checked.error("model.d_model", message)


def check_data_module(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each option that a run with a user's LightningDataModule cannot have.

    Yields nothing if the data group is no LightningDataModule.
    """
    run = checked.run
    if not isinstance(run.data, DataModuleConfig):
        return
    message = "not with a LightningDataModule, whose order, samples and tokens are not known"
    hint = "data.train._target_ and data.val._target_, a dataset or a stream each"
    strategy = find_strategy(run.strategy.name)
    if strategy is not None and not strategy.is_standard:
        yield checked.error("strategy.name", message, "strategy=ddp")
    for key in ("max_tokens", "data.global_batch_size", "trainer.overfit_batches", *TOKEN_PHASES):
        if checked.flat.get(key):
            yield checked.error(key, message, hint)


def check_length(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if nothing ends the run, or if the lengths of its phases do not fit together.

    Two keys must not give the same length, and a warm-up must not be longer than its schedule. A
    schedule that decays until the last step needs a known number of steps, so that a run which only
    a time limit ends is a problem, too. An evaluation and a run with fast_dev_run end by
    themselves.
    """
    run, trainer, scheduler = checked.run, checked.run.trainer, checked.run.scheduler
    for name in ("warmup", "decay", "total"):
        phase = scheduler.phase(name)
        if phase.steps is not None and phase.tokens:
            key = f"scheduler.{name}_steps"
            message = f"excludes {key}={show(checked.flat.get(key))}: both set the same length"
            yield checked.error(f"scheduler.{name}_tokens", message, f"{key}=null")
    warmup, total = scheduler.phase("warmup"), scheduler.phase("total")
    for unit, warmup_length, total_length in (
        ("steps", warmup.steps, total.steps),
        ("tokens", warmup.tokens, total.tokens),
    ):
        if total_length and (warmup_length or 0) > total_length:
            key = f"scheduler.warmup_{unit}"
            message = f"must be <= scheduler.total_{unit}={show(total_length)}"
            yield checked.error(key, message, f"{key}={int(total_length // 10)}")
    is_total_given = bool(total.steps or total.tokens)
    steps = -1 if trainer.max_steps is None else trainer.max_steps
    tokens = run.max_tokens
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
    elif isinstance(scheduler, DecayConfig) and not is_total_given:
        message = "the schedule decays until the last step, which trainer.max_time leaves unknown"
        hint = "scheduler=warmup_constant, or scheduler.total_steps=<steps>"
        yield checked.error("scheduler.total_steps", message, hint)


def check_strategy(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each option that the strategy or the accelerator does not support.

    The options are the precision, torch.compile, `on_spike`, and options of the strategy itself.
    Under an unknown strategy, which is an error already, only the accelerator is checked.
    """
    run = checked.run
    name, strategy = run.strategy.name, find_strategy(run.strategy.name)
    if run.trainer.accelerator == "cpu":
        yield from check_cpu(checked)
    if strategy is None:
        return
    if find_precision(run.trainer.precision).is_fp16 and not strategy.is_standard:
        message = f"strategy={name} does not scale the loss, which fp16 needs"
        yield checked.error("trainer.precision", message, "trainer.precision=bf16-mixed")
    if strategy.needs and run.model.compile == "model":
        message = f"strategy={name} has collectives and hooks between the blocks"
        yield checked.error("model.compile", message, "model.compile=blocks")
    recomputes = (run.model.activation_checkpointing or "none") != "none"
    if TENSOR in strategy.axes and recomputes and (run.model.compile or "none") != "none":
        message = (
            f"under strategy={name} torch cannot compile the recomputation of activations "
            "from sharded weights"
        )
        yield checked.error("model.compile", message, "model.activation_checkpointing=none")


def check_cpu(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for a precision or a backend that is not available on a CPU."""
    precision, backend = checked.run.trainer.precision, checked.run.strategy.backend
    if find_precision(precision).is_fp16:
        hint = "trainer.precision=bf16-mixed"
        yield checked.error("trainer.precision", "not supported on CPU", hint)
    if backend == "nccl":
        yield checked.error("strategy.backend", "NCCL needs GPUs", "strategy.backend=gloo")


def check_start(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if the first weights have two sources, and a warning if they have none.

    `init_from` excludes a path in `ckpt_path`, but not `ckpt_path=last` or `ckpt_path=best`: the
    run that saved those checkpoints has itself started from `init_from`. With `from_run` nothing is
    excluded, because `init_from` may be an override of the earlier run. A task other than `fit`
    without `ckpt_path`, `init_from` and `from_run` evaluates the initial weights, which is a
    warning, except under fast_dev_run.
    """
    run = checked.run
    is_path = run.ckpt_path not in (None, "last", "best")
    if is_path and run.init_from and not run.from_run:
        message = "excludes a path in ckpt_path: a run has one source of its first weights"
        yield checked.error("init_from", message, "ckpt_path=last")
    has_weights = run.ckpt_path or run.init_from or run.from_run
    if (run.task or "fit") != "fit" and not has_weights and not run.trainer.fast_dev_run:
        message = "no ckpt_path: the task evaluates the initial weights"
        yield checked.error("task", message, "ckpt_path=best", code=DONE)


def check_world(checked: CheckedConfig, world_size: int) -> Iterator[ConfigIssue]:
    """Yield a problem if the net, the batch or the steps cannot be divided over a number of ranks.

    Yields a warning for a strategy of several ranks on one device. Yields nothing if the strategy
    is unknown or a key of it has an error already, and nothing more if the ranks do not fit the
    axes of the strategy.

    Args:
        checked: Config to check.
        world_size: Number of ranks of the whole job.
    """
    run, options = checked.run, checked.run.strategy
    name = options.name
    has_error = any(key.startswith("strategy.") for key in checked.wrong_keys)
    if has_error or find_strategy(name) is None:
        return
    try:
        dims = parallel_dims(options, world_size, count_nodes(run.trainer.num_nodes or 1))
    except ValueError as error:
        axes = (axis for axis in (CONTEXT, TENSOR, PIPELINE) if options.axis_size(axis))
        key = next((f"strategy.{axis}_parallel_size" for axis in axes), "trainer.devices")
        yield checked.error(key, str(error))
        return
    if world_size == 1 and name not in ("auto", "single"):
        hint = "trainer.devices=2"
        yield ConfigIssue("strategy", name, "no effect on one device", hint=hint, code=DONE)
    if isinstance(run.model, DecoderConfig):
        yield from _check_split(checked, run.model, dims)
    if dims.data % dims.replicas:
        message = f"does not divide the {dims.data} data-parallel ranks"
        yield checked.error("strategy.replicas", message, allowed=divisors(dims.data))
    if isinstance(options, PipelineOptions):
        yield from _check_microbatches(checked, options, dims.pipeline)
    yield from _check_steps(checked, dims.data)


def _check_split(
    checked: CheckedConfig, model: DecoderConfig, dims: ParallelDims
) -> Iterator[ConfigIssue]:
    """Yield a problem if the heads or the layers of a decoder cannot be divided over the ranks.

    Args:
        checked: Config to check.
        model: Model section of the config.
        dims: Number of ranks along each axis of the device mesh.
    """
    heads = {"model.n_kv_heads": model.arguments.get("n_kv_heads"), "model.n_heads": model.n_heads}
    for key, n_heads in heads.items():
        # Context parallelism repeats heads of k and v for ranks that would have none.
        n_context = dims.context if key == "model.n_heads" else 1
        for axis, n_ranks in ((CONTEXT, n_context), (TENSOR, dims.tensor)):
            if n_heads and n_heads % n_ranks:
                message = f"does not divide {key}={n_heads}; a head is not split over ranks"
                allowed = divisors(n_heads)
                yield checked.error(f"strategy.{axis}_parallel_size", message, allowed=allowed)
    if model.n_layers and dims.pipeline > model.n_layers:
        message = (
            f"{dims.pipeline} stages, but model.n_layers={model.n_layers}: a stage needs a layer"
        )
        yield checked.error("strategy.pipeline_parallel_size", message)


def _check_microbatches(
    checked: CheckedConfig, options: PipelineOptions, n_ranks: int
) -> Iterator[ConfigIssue]:
    """Yield a problem if the number of microbatches does not fit the batch size or the schedule.

    Args:
        checked: Config to check.
        options: Options of the pipeline.
        n_ranks: Number of ranks along the pipeline axis.
    """
    batch_size = checked.run.data.batch_size
    n_micro = count_microbatches(options.microbatches, n_ranks)
    if batch_size and batch_size % n_micro:
        message = f"not divisible into {n_micro} microbatches"
        hint = f"data.batch_size={n_micro * max(1, batch_size // n_micro)}"
        yield checked.error("data.batch_size", message, hint)
    hint = f"strategy.microbatches={2 * n_ranks}, or strategy.schedule=gpipe"
    if options.schedule == "1f1b" and n_micro < n_ranks:
        message = f"1f1b needs at least one microbatch per stage ({n_ranks})"
        yield checked.error("strategy.microbatches", message, hint)


def _check_steps(checked: CheckedConfig, n_data: int) -> Iterator[ConfigIssue]:
    """Yield a problem about the batches of a step, the length of an epoch or the warm-up.

    A global batch size must be divisible by the samples of a micro-step. Gradient accumulation does
    not work with `strategy.static_graph`. For a training, a data set of known size must have an
    optimizer step per epoch, and a warm-up that is longer than the run is a warning. Yields nothing
    if the batch size or the accumulation is not known.

    Args:
        checked: Config to check.
        n_data: Number of data-parallel ranks.
    """
    run, data, trainer = checked.run, checked.run.data, checked.run.trainer
    is_known = data.batch_size and trainer.accumulate_grad_batches
    if not is_known or "data.global_batch_size" in checked.wrong_keys:
        return
    try:
        batch = run.batch_plan(n_data)
    except ValueError as error:
        yield checked.error("data.global_batch_size", str(error))
        return
    is_static = isinstance(run.strategy, DDPOptions) and run.strategy.static_graph
    if batch.accumulate > 1 and is_static:
        message = "torch 2.13 does not support a static graph with gradient accumulation"
        yield checked.error("strategy.static_graph", message, "strategy.static_graph=false")
    # Any other dataset reports its length after it was built.
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

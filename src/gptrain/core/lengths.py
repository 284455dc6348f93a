"""Arithmetic of a run's length: sequences and tokens per optimizer step, and number of steps.

Nothing here imports torch, so that the command line and the planner use the same functions as a
run.
"""

from dataclasses import dataclass
from typing import Literal

from gptrain.core.errors import ConfigError
from gptrain.core.schema import RunConfig

_DEFAULT_WARMUP_STEPS = 100
_DEFAULT_DECAY = 0.2  # fraction of the run, from arXiv:2405.18392
_DEFAULT_MAX_EPOCHS = 3


def loss_rows(device_type: str) -> int:
    """Return the number of positions whose logits the chunked loss holds in memory at a time.

    `device_type` is torch's, such as "cuda".
    """
    # On a CPU, 128 positions would read the weights of the head twice as often, and 512 positions
    # need 50 MB more. Other devices need 4096 to fill the kernels.
    return 256 if device_type == "cpu" else 4096


@dataclass(frozen=True)
class BatchPlan:
    """The three numbers whose product is the global batch size of a run.

    Attributes:
        batch_size: Sequences per data-parallel rank per micro-step.
        data_parallel_size: Number of ranks that train on different samples.
        accumulate: Micro-steps per optimizer step.
    """

    batch_size: int
    data_parallel_size: int
    accumulate: int

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.batch_size * self.data_parallel_size * self.accumulate


@dataclass(frozen=True)
class RunLengths:
    """Length of a run. All steps are optimizer steps.

    Attributes:
        batch: Numbers that multiply to the global batch size.
        sample_tokens: Positions of one sample. 1 for data that are not tokens.
        epoch_steps: Steps of one epoch, at least 1, after `trainer.limit_train_batches`.
        n_steps: Steps of the run from its first start. None if no number of steps ends the run.
        validate_every: Steps between two validations, at most `n_steps` if there is such a number.
        limit: Override that sets `n_steps`, such as `trainer.max_epochs=3`. Empty if that is None.
        warmup_steps: Warm-up steps that a resume takes over from the first start of the run. None
            if the scheduler section of the config decides, see `phase_steps`.
        unit: "samples" for data that are not tokens, else "tokens".
    """

    batch: BatchPlan
    sample_tokens: int
    epoch_steps: int
    n_steps: int | None
    validate_every: int
    limit: str = ""
    warmup_steps: int | None = None
    unit: Literal["tokens", "samples"] = "tokens"

    @property
    def step_tokens(self) -> int:
        """Tokens, or samples of other data, that one optimizer step trains on, over all ranks."""
        return self.batch.global_batch_size * self.sample_tokens

    @property
    def n_epochs(self) -> int:
        """Epochs of the run, rounded up, or -1 if `n_steps` is None."""
        return -1 if self.n_steps is None else -(-self.n_steps // self.epoch_steps)


def plan_batch(cfg: RunConfig, data_parallel_size: int) -> BatchPlan:
    """Return the batch plan of a run on a number of ranks.

    `data.global_batch_size` sets the accumulation. If it is null, `trainer.accumulate_grad_batches`
    sets it.

    Args:
        data_parallel_size: Number of ranks that train on different samples.

    Raises:
        ValueError: If data.global_batch_size is no multiple of a micro-step of all ranks, or is
            given together with trainer.accumulate_grad_batches.
    """
    batch_size, global_batch_size = cfg.data.batch_size, cfg.data.global_batch_size
    accumulate = cfg.trainer.accumulate_grad_batches
    if global_batch_size is None:
        return BatchPlan(batch_size, data_parallel_size, accumulate)
    if accumulate != 1:
        other = f"trainer.accumulate_grad_batches={accumulate}"
        raise ValueError(f"excludes {other}: both set the accumulation")
    micro = batch_size * data_parallel_size
    if global_batch_size < micro or global_batch_size % micro:
        below = global_batch_size // micro * micro
        above = -(-global_batch_size // micro) * micro
        nearest = ", ".join(str(size) for size in (below, above) if size > 0)
        raise ValueError(
            f"not divisible by {data_parallel_size} ranks x data.batch_size {batch_size}; "
            f"nearest: {nearest}"
        )
    return BatchPlan(batch_size, data_parallel_size, global_batch_size // micro)


def plan_lengths(
    cfg: RunConfig, batch: BatchPlan, n_samples: int, sample_tokens: int | None
) -> RunLengths:
    """Return the length of a run that starts at step 0. `warmup_steps` of the result is None.

    Args:
        batch: Batch plan of the run. Its sizes count, and not those in `cfg`.
        n_samples: Number of samples of the training set.
        sample_tokens: Positions of one sample. None for data that are not tokens: a sample then
            counts as one position.

    Raises:
        ConfigError: If max_tokens is less than one step.
    """
    trainer = cfg.trainer
    epoch_steps = max(1, n_samples // batch.global_batch_size)
    if (batches := trainer.limit_train_batches) is not None:
        is_fraction = isinstance(batches, float)  # else a number of micro-batches
        limited_steps = int(batches * epoch_steps) if is_fraction else batches // batch.accumulate
        epoch_steps = max(1, min(epoch_steps, limited_steps))
    step_tokens = batch.global_batch_size * (sample_tokens or 1)
    n_steps, limit = find_end(cfg, epoch_steps, step_tokens)
    interval = trainer.val_check_interval
    if isinstance(interval, float):  # a fraction of check_val_every_n_epoch epochs
        interval = max(1, int(interval * epoch_steps * (trainer.check_val_every_n_epoch or 1)))
    return RunLengths(
        batch,
        sample_tokens or 1,
        epoch_steps,
        n_steps,
        interval if n_steps is None else min(interval, n_steps),
        limit,
        unit="samples" if sample_tokens is None else "tokens",
    )


def find_end(cfg: RunConfig, epoch_steps: int, step_tokens: int) -> tuple[int | None, str]:
    """Return the number of steps of a run, and the override that sets it.

    The smallest limit counts, or fast_dev_run alone. If `trainer.max_epochs` is null and no other
    key limits the steps or the time, a run has 3 epochs. Without a limit of steps it is (None, "").

    Args:
        epoch_steps: Steps of one epoch.
        step_tokens: Tokens of one step, over all ranks.

    Raises:
        ConfigError: If `max_tokens` is less than one step.
    """
    trainer = cfg.trainer
    if trainer.fast_dev_run:
        return int(trainer.fast_dev_run), "trainer.fast_dev_run=true"
    ends: list[tuple[int, str]] = []
    if trainer.max_steps != -1:
        ends.append((trainer.max_steps, f"trainer.max_steps={trainer.max_steps}"))
    if cfg.max_tokens is not None:
        n_steps = token_steps("max_tokens", cfg.max_tokens, step_tokens)
        ends.append((n_steps, f"max_tokens={cfg.max_tokens:g}"))
    n_epochs = trainer.max_epochs
    if n_epochs is None and not ends and trainer.max_time is None:
        n_epochs = _DEFAULT_MAX_EPOCHS
    if n_epochs not in (None, -1):
        ends.append((n_epochs * epoch_steps, f"trainer.max_epochs={n_epochs}"))
    return min(ends, key=lambda end: end[0], default=(None, ""))


def token_steps(key: str, n_tokens: float, step_tokens: int) -> int:
    """Return how many steps of `step_tokens` each fit into `n_tokens`, rounded down.

    Raises a ConfigError about the config key `key`, whose value is `n_tokens`, if that is less than
    one step.
    """
    if n_tokens < step_tokens:
        raise ConfigError.of(key, n_tokens, f"less than the {step_tokens} tokens of one step")
    return int(n_tokens // step_tokens)


def phase_steps(
    cfg: RunConfig, phase: Literal["warmup", "decay", "total"], lengths: RunLengths
) -> int | None:
    """Return the number of optimizer steps of a phase of the learning-rate schedule.

    The keys `scheduler.<phase>_steps` and `scheduler.<phase>_tokens` set it. Steps below 1 are a
    fraction of the total, which is rounded, also to 0. If both keys are null:

    total: The length of the run. None if it is not known, which only this phase can return.
    warmup: 100 steps, or a tenth of the total if that is less.
    decay: A fifth of the total.

    For the warm-up, `lengths.warmup_steps` wins over the config if it is not None.

    Raises:
        ConfigError: If the tokens of the phase are less than one step, or if the phase is a
            fraction, such as the default of the decay, of a total that is not known.
    """
    if phase == "warmup" and lengths.warmup_steps is not None:
        return lengths.warmup_steps
    steps, tokens = cfg.scheduler.phase(phase)
    if tokens is not None:
        return token_steps(f"scheduler.{phase}_tokens", tokens, lengths.step_tokens)
    total = lengths.n_steps if phase == "total" else phase_steps(cfg, "total", lengths)
    if steps is None and phase == "total":
        return total
    if steps is None and phase == "warmup":
        return _DEFAULT_WARMUP_STEPS if total is None else min(_DEFAULT_WARMUP_STEPS, total // 10)
    steps = _DEFAULT_DECAY if steps is None else steps
    if not 0 < steps < 1:
        return int(steps)
    if total is None:
        message = "a fraction of a run of unknown length"
        raise ConfigError.of(f"scheduler.{phase}_steps", steps, message)
    return round(steps * total)

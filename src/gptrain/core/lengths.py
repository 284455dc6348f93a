"""How many sequences and tokens one optimizer step takes, and how many steps a run has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol


def loss_rows(device_type: str) -> int:
    """Positions whose logits a chunked loss holds at a time.

    On a CPU 128 read the head twice as often and 512 take 50 MB more; elsewhere 4096 are enough for
    whole kernels, and each chunk rewrites the head's gradient.
    """
    return 256 if device_type == "cpu" else 4096


@dataclass(frozen=True)
class BatchPlan:
    """The batch arithmetic of a run."""

    batch_size: int  # sequences per device per micro-step
    data_parallel_size: int  # ranks that see different samples
    accumulate: int  # micro-steps per optimizer step

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.batch_size * self.data_parallel_size * self.accumulate

    def steps_per_epoch(self, n_samples: int) -> int:
        """Complete steps in one pass over the data; what remains is left to the next shuffle."""
        return n_samples // self.global_batch_size


@dataclass(frozen=True)
class RunLengths:
    """How long a run is; steps are the optimizer's."""

    batch: BatchPlan
    sample_tokens: int  # positions of one sample
    epoch_steps: int
    n_steps: int | None  # of the run; None where only max_time ends it
    validate_every: int  # steps between two validations, at most n_steps
    limit: str = ""  # what n_steps comes from, as one would type it
    limit_kind: Literal["steps", "epochs", "tokens"] = "steps"  # what is done at the run's end
    warmup_steps: int | None = None  # of the run's first start, where a resume keeps it
    unit: Literal["tokens", "samples"] = "tokens"  # what is counted: positions, or samples of one

    @property
    def step_tokens(self) -> int:
        """Positions that a step trains on, over all ranks."""
        return self.batch.global_batch_size * self.sample_tokens

    @property
    def n_epochs(self) -> int:
        """Epochs of the run, the last of which may be cut short; -1: no limit."""
        return -1 if self.n_steps is None else -(-self.n_steps // self.epoch_steps)


def plan_batch(
    batch_size: int, global_batch_size: int | None, accumulate: int, data_parallel_size: int
) -> BatchPlan:
    """Derives the accumulation from the global batch, where one is given.

    Raises:
        ValueError: an accumulation is given, too; or global_batch_size is no multiple of what one
            micro-step takes: the message shows the equation and the nearest sizes that are.
    """
    if global_batch_size is None:
        return BatchPlan(batch_size, data_parallel_size, accumulate)
    if accumulate != 1:
        raise ValueError(f"derives the accumulation; trainer.accumulate_grad_batches={accumulate}")
    micro = batch_size * data_parallel_size
    if global_batch_size < micro or global_batch_size % micro:
        below, above = global_batch_size // micro * micro, -(-global_batch_size // micro) * micro
        nearest = ", ".join(str(size) for size in (below, above) if size > 0)
        raise ValueError(
            f"not divisible by {data_parallel_size} ranks x data.batch_size {batch_size}; "
            f"nearest: {nearest}"
        )
    return BatchPlan(batch_size, data_parallel_size, global_batch_size // micro)


def run_steps(steps_per_epoch: int, max_epochs: int | None, max_steps: int) -> int | None:
    """Optimizer steps of the whole run; None where only a time ends it.

    Args:
        steps_per_epoch: after any limit.
        max_epochs: None: no limit by epochs.   max_steps: -1: no limit by steps.
    """
    by_epochs = [] if max_epochs is None else [max_epochs * steps_per_epoch]
    by_steps = [] if max_steps == -1 else [max_steps]
    return min(by_epochs + by_steps, default=None)


def token_steps(max_tokens: float, step_tokens: int) -> int:
    """Optimizer steps that train on at most max_tokens.

    Raises: ValueError if that is less than one step.
    """
    if max_tokens < step_tokens:
        raise ValueError(f"less than the {step_tokens} tokens of one step")
    return int(max_tokens // step_tokens)


DEFAULT_WARMUP_STEPS = 100


def warmup_steps(asked: float | None, total_steps: int | None) -> int:
    """Steps of the warm-up, as phase_steps; None: 100 or a tenth of the run, whichever is less.

    Raises: ValueError as phase_steps.
    """
    if asked is not None:
        return phase_steps(asked, total_steps)
    if total_steps is None:
        return DEFAULT_WARMUP_STEPS
    return min(DEFAULT_WARMUP_STEPS, total_steps // 10)


def phase_steps(asked: float, total_steps: int | None) -> int:
    """Steps of a part of the run: an integer number of them, or below 1 a fraction of it.

    Args:
        total_steps: None where only a time ends the run.

    Raises: ValueError for a fraction of a run of unknown length, and for what is neither.
    """
    if asked < 0 or (asked > 1 and asked != int(asked)):
        raise ValueError("neither an integer number of steps nor a fraction of the run below 1")
    if not 0 < asked < 1:
        return int(asked)
    if total_steps is None:
        raise ValueError("a fraction of a run of unknown length")
    return round(asked * total_steps)


DEFAULT_DECAY = 0.2  # of the run: arXiv:2405.18392
DEFAULT_MAX_EPOCHS = 3


class HasLimits(Protocol):
    """What limits a run: three keys of the trainer group, with Lightning's values."""

    max_epochs: int | None
    max_steps: int
    max_time: Any


def effective_max_epochs(trainer: HasLimits, max_tokens: float | None) -> int | None:
    """Return the number of epochs of the run, or None for no limit.

    As in Lightning, a limit by steps or by time alone lifts the default.
    """
    if trainer.max_epochs is not None:
        return None if trainer.max_epochs == -1 else trainer.max_epochs
    is_limited = trainer.max_steps != -1 or trainer.max_time is not None
    return None if is_limited or max_tokens is not None else DEFAULT_MAX_EPOCHS

"""Arithmetic of a run's length: sequences and tokens per optimizer step, and number of steps.

Nothing here imports torch, so that the command line and the planner use the same functions as a
run.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol


def loss_rows(device_type: str) -> int:
    """Return the number of positions whose logits the chunked loss holds in memory at a time.

    It is 256 on a CPU: 128 positions read the weights of the head twice as often, and 512 positions
    need 50 MB more. It is 4096 on any other device, enough to fill the kernels. Smaller chunks
    would cost time, because each chunk adds to the gradient of the whole head.

    Args:
        device_type: Type of the torch.device, such as `cpu` or `cuda`.
    """
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

    def steps_per_epoch(self, n_samples: int) -> int:
        """Return the number of complete optimizer steps in one pass over the data. It may be 0.

        The samples that do not fill a step are left out of the epoch. The next epoch has another
        order, so it leaves out other samples.

        Args:
            n_samples: Number of samples of the dataset, over all ranks.
        """
        return n_samples // self.global_batch_size


@dataclass(frozen=True)
class RunLengths:
    """Length of a run. All steps are optimizer steps.

    Attributes:
        batch: Numbers that multiply to the global batch size.
        sample_tokens: Positions of one sample. 1 for data that are not tokens.
        epoch_steps: Steps of one epoch, after `trainer.limit_train_batches`.
        n_steps: Steps of the run, or None if only `trainer.max_time` ends the run.
        validate_every: Steps between two validations, at most `n_steps`.
        limit: Override that sets `n_steps`, such as `trainer.max_epochs=3`.
        limit_kind: Unit of `limit`.
        warmup_steps: Warm-up steps that a resume takes over from the first start of the run. None
            if the scheduler section of the config decides.
        unit: `samples` for data that are not tokens, else `tokens`.
    """

    batch: BatchPlan
    sample_tokens: int
    epoch_steps: int
    n_steps: int | None
    validate_every: int
    limit: str = ""
    limit_kind: Literal["steps", "epochs", "tokens"] = "steps"
    warmup_steps: int | None = None
    unit: Literal["tokens", "samples"] = "tokens"

    @property
    def step_tokens(self) -> int:
        """Positions that one optimizer step trains on, over all ranks."""
        return self.batch.global_batch_size * self.sample_tokens

    @property
    def n_epochs(self) -> int:
        """Epochs of the run, rounded up, or -1 for no limit. The last epoch may be cut short."""
        return -1 if self.n_steps is None else -(-self.n_steps // self.epoch_steps)


def plan_batch(
    batch_size: int, global_batch_size: int | None, accumulate: int, data_parallel_size: int
) -> BatchPlan:
    """Return the batch plan, with the accumulation derived from the global batch size if given.

    Args:
        batch_size: Sequences per data-parallel rank per micro-step.
        global_batch_size: Sequences per optimizer step over all ranks, or None.
        accumulate: Micro-steps per optimizer step. Must be 1 if `global_batch_size` is given.
        data_parallel_size: Number of ranks that train on different samples.

    Raises:
        ValueError: If `global_batch_size` and an accumulation are both given, or if
            `global_batch_size` is not a multiple of batch_size x data_parallel_size. The message
            names the nearest sizes that are.
    """
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


def run_steps(steps_per_epoch: int, max_epochs: int | None, max_steps: int) -> int | None:
    """Return the number of optimizer steps of the run, or None if only a time limit ends the run.

    Args:
        steps_per_epoch: Optimizer steps of one epoch, after `trainer.limit_train_batches`.
        max_epochs: Maximum number of epochs, or None for no limit.
        max_steps: Maximum number of optimizer steps, or -1 for no limit.
    """
    by_epochs = [] if max_epochs is None else [max_epochs * steps_per_epoch]
    by_steps = [] if max_steps == -1 else [max_steps]
    return min(by_epochs + by_steps, default=None)


def token_steps(max_tokens: float, step_tokens: int) -> int:
    """Return the largest number of optimizer steps that train on at most `max_tokens` tokens.

    Args:
        max_tokens: Token budget of the run, over all ranks.
        step_tokens: Tokens of one optimizer step, over all ranks.

    Raises:
        ValueError: If the budget is less than one step.
    """
    if max_tokens < step_tokens:
        raise ValueError(f"less than the {step_tokens} tokens of one step")
    return int(max_tokens // step_tokens)


DEFAULT_WARMUP_STEPS = 100


def warmup_steps(length: float | None, total_steps: int | None) -> int:
    """Return the number of warm-up steps.

    Args:
        length: Number of steps, or a fraction of the run below 1. None stands for 100 steps or a
            tenth of the run, whichever is less.
        total_steps: Steps of the run, or None if only a time limit ends the run. A `length` of None
            is then 100 steps.

    Raises:
        ValueError: If `length` is neither an integer number of steps nor a fraction of the run, or
            is a fraction and `total_steps` is None.
    """
    if length is not None:
        return phase_steps(length, total_steps)
    if total_steps is None:
        return DEFAULT_WARMUP_STEPS
    return min(DEFAULT_WARMUP_STEPS, total_steps // 10)


def phase_steps(length: float, total_steps: int | None) -> int:
    """Return the number of steps of one phase of the schedule. A fraction is rounded to a step.

    Args:
        length: Integer number of steps, or a fraction of the run between 0 and 1. The number 1 is
            one step.
        total_steps: Steps of the run, or None if only a time limit ends the run.

    Raises:
        ValueError: If `length` is neither of the two, or is a fraction and the length of the run is
            unknown.
    """
    if length < 0 or (length > 1 and length != int(length)):
        raise ValueError("neither an integer number of steps nor a fraction of the run below 1")
    if not 0 < length < 1:
        return int(length)
    if total_steps is None:
        raise ValueError("a fraction of a run of unknown length")
    return round(length * total_steps)


DEFAULT_DECAY = 0.2  # fraction of the run, from arXiv:2405.18392
DEFAULT_MAX_EPOCHS = 3


class HasLimits(Protocol):
    """Any object with the three limits of a run, such as the trainer section of the config.

    Attributes:
        max_epochs: Maximum number of epochs. -1 for no limit, None if not given.
        max_steps: Maximum number of optimizer steps, or -1 for no limit.
        max_time: Maximum duration, or None for no limit.
    """

    max_epochs: int | None
    max_steps: int
    max_time: Any


def effective_max_epochs(trainer: HasLimits, max_tokens: float | None) -> int | None:
    """Return the number of epochs of the run, or None for no limit.

    The default of 3 epochs holds only if no other limit is given: neither steps, nor time, nor
    tokens.

    Args:
        trainer: Trainer section of the config.
        max_tokens: Token budget of the run, or None.
    """
    if trainer.max_epochs is not None:
        return None if trainer.max_epochs == -1 else trainer.max_epochs
    is_limited = trainer.max_steps != -1 or trainer.max_time is not None
    return None if is_limited or max_tokens is not None else DEFAULT_MAX_EPOCHS

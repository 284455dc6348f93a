"""Computes from the config and the data the number of steps and the validations of a run."""

from typing import Literal

from gptrain.assemble.config_errors import as_config_errors
from gptrain.core.lengths import (
    RunLengths,
    effective_max_epochs,
    run_steps,
    token_steps,
)
from gptrain.core.schema import RunConfig


def plan_lengths(
    cfg: RunConfig, n_samples: int, sample_tokens: int | None, data_parallel_size: int
) -> RunLengths:
    """Return the batch arithmetic, the number of steps, and the steps between two validations.

    An epoch has at least one step, also if the data or trainer.limit_train_batches give less.

    Args:
        cfg: Configuration of the run.
        n_samples: Number of training samples.
        sample_tokens: Positions of one sample. None for data that are not tokens; then a sample
            counts as one position.
        data_parallel_size: Number of ranks that see different samples.

    Raises:
        ConfigError: If max_tokens is less than one step.
        ValueError: If data.global_batch_size cannot be divided by the samples of a micro-step.
    """
    trainer, batch = cfg.trainer, cfg.batch_plan(data_parallel_size)
    epoch_steps = max(1, batch.steps_per_epoch(n_samples))
    if trainer.limit_train_batches is not None:
        limit = trainer.limit_train_batches
        if isinstance(limit, float):  # a fraction of the epoch
            limited_steps = int(limit * epoch_steps)
        else:  # micro-batches
            limited_steps = limit // batch.accumulate
        epoch_steps = max(1, min(epoch_steps, limited_steps))
    unit = "samples" if sample_tokens is None else "tokens"
    sample_tokens = sample_tokens or 1
    step_tokens = batch.global_batch_size * sample_tokens
    n_steps, limit_text, limit_kind = _find_end(cfg, epoch_steps, step_tokens)
    interval = trainer.val_check_interval
    if isinstance(interval, float):  # a fraction of check_val_every_n_epoch epochs
        interval = max(1, int(interval * epoch_steps * (trainer.check_val_every_n_epoch or 1)))
    if n_steps is not None:
        interval = min(interval, n_steps)
    return RunLengths(
        batch, sample_tokens, epoch_steps, n_steps, interval, limit_text, limit_kind, unit=unit
    )


def _find_end(
    cfg: RunConfig, epoch_steps: int, step_tokens: int
) -> tuple[int | None, str, Literal["steps", "epochs", "tokens"]]:
    """Return the number of steps of the run, and the option that limits it.

    Args:
        cfg: Configuration of the run.
        epoch_steps: Optimizer steps of one epoch.
        step_tokens: Tokens of one optimizer step, over all ranks.

    Returns:
        The number of steps (None if only a time limit ends the run), the option as an override such
        as `max_tokens=1e+09`, and the unit that the option counts.

    Raises:
        ConfigError: If max_tokens is less than one step.
    """
    trainer = cfg.trainer
    if trainer.fast_dev_run:
        return int(trainer.fast_dev_run), "trainer.fast_dev_run=true", "steps"
    if cfg.max_tokens is not None:
        with as_config_errors(cfg, "max_tokens"):
            n_steps = token_steps(cfg.max_tokens, step_tokens)
        return n_steps, f"max_tokens={cfg.max_tokens:g}", "tokens"
    max_epochs = effective_max_epochs(trainer, cfg.max_tokens)
    n_steps = run_steps(epoch_steps, max_epochs, trainer.max_steps)
    if n_steps == trainer.max_steps:
        return n_steps, f"trainer.max_steps={n_steps}", "steps"
    return n_steps, f"trainer.max_epochs={max_epochs}", "epochs"

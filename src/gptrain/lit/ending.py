"""Why a training ended, and how loggers hear of it."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from gptrain.plan.batch import Lengths


@dataclass(frozen=True)
class Ended:
    """The end of a run that is done, as the result line and result.json say it.

    Attributes:
        reason: one of "steps done", "epochs done", "tokens done", "max_time", "early stop",
            "stopped", "nothing left to train"; of an evaluation "validate done", "test done".
        detail: the option, the metric with its value, or who it was.
    """

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}, {self.detail}"


def why_ended(trainer: pl.Trainer, lengths: Lengths, first_step: int | None) -> Ended:
    """Why a fit that has come to its end did.

    Args:
        first_step: where it began; None where no step was left.
    """
    step = trainer.global_step
    if first_step is None:
        way = "further: trainer.max_steps, trainer.max_epochs"
        return Ended("nothing left to train", f"step {step} was the run's last; {way}")
    if step == lengths.n_steps:
        kind = lengths.limit.partition("=")[0].rpartition("max_")[2]  # of trainer.max_epochs=3
        return Ended(f"{kind} done", lengths.limit)
    timers = (part for part in trainer.callbacks if isinstance(part, Timer))
    if any((timer.time_remaining() or 1.0) <= 0 for timer in timers):
        return Ended("max_time", f"at step {step}")
    for callback in trainer.early_stopping_callbacks:
        if callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
            return Ended("early stop", f"{stopped_by(callback, trainer)}, at step {step}")
    return Ended("stopped", f"by a callback or the module (trainer.should_stop), at step {step}")


def log_note(trainer: pl.Trainer, name: str, text: str) -> None:
    """Gives a text to the loggers that take any, at this step."""
    for logger in trainer.loggers:
        if hasattr(logger, "log_note"):
            logger.log_note(name, text, trainer.global_step)


def stopped_by(callback: EarlyStopping, trainer: pl.Trainer) -> str:
    """The metric, its value, and what of it stopped the run."""
    why = {
        EarlyStoppingReason.PATIENCE_EXHAUSTED: f"not better than {callback.best_score:.4g} "
        f"in {callback.wait_count} checks",
        EarlyStoppingReason.STOPPING_THRESHOLD: f"reached {callback.stopping_threshold}",
        EarlyStoppingReason.DIVERGENCE_THRESHOLD: f"beyond {callback.divergence_threshold}",
        EarlyStoppingReason.NON_FINITE_METRIC: "not finite",
    }
    value = float(trainer.callback_metrics[callback.monitor])
    return f"{callback.monitor}={value:.4g} {why[callback.stopping_reason]}"

"""Why a training ended, and how loggers hear of it."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer

from gptrain.plan.batch import Lengths


def why_ended(trainer: pl.Trainer, lengths: Lengths, first_step: int | None) -> dict[str, str]:
    """Why a fit that has come to its end did, as the result line and result.json say it.

    `reason` is one of "steps done", "epochs done", "tokens done", "max_time", "early stop",
    "stopped", "nothing left to train"; `detail` the option, the metric with its value, or who.

    Args:
        first_step: where it began; None where no step was left.
    """
    step, detail = trainer.global_step, f"at step {trainer.global_step}"
    timers = (part for part in trainer.callbacks if isinstance(part, Timer))
    early = [part for part in trainer.early_stopping_callbacks if part.stopping_reason.value]
    if first_step is None:
        reason = "nothing left to train"
        detail = f"step {step} was the run's last; further: trainer.max_steps, trainer.max_epochs"
    elif step == lengths.n_steps:
        kind = lengths.limit.partition("=")[0].rpartition("max_")[2]  # of trainer.max_epochs=3
        reason, detail = f"{kind} done", lengths.limit
    elif any((timer.time_remaining() or 1.0) <= 0 for timer in timers):
        reason = "max_time"
    elif early:
        metric = early[0].monitor
        why = early[0].stopping_reason.name.lower().replace("_", " ")
        reason = "early stop"
        detail = f"{metric}={trainer.callback_metrics[metric]:.4g} {why}, {detail}"
    else:
        reason, detail = "stopped", f"by a callback or the module (trainer.should_stop), {detail}"
    return {"reason": reason, "detail": detail}


def log_note(trainer: pl.Trainer, name: str, text: str) -> None:
    """Gives a text to the loggers that take any, at this step."""
    for logger in trainer.loggers:
        if hasattr(logger, "log_note"):
            logger.log_note(name, text, trainer.global_step)

"""The reason why a training run ended without an error."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer

from gptrain.core.lengths import RunLengths
from gptrain.lit.lightning import callbacks_of


def why_ended(trainer: Trainer, lengths: RunLengths, first_step: int | None) -> dict[str, str]:
    """Return the reason why a fit ended without an error, for the result line and result.json."""
    step = trainer.global_step
    detail = f"at step {step}"
    timers = [part for part in callbacks_of(trainer) if isinstance(part, Timer)]
    early = [part for part in trainer.early_stopping_callbacks if part.stopping_reason.value]
    if first_step is None:
        reason = "nothing left to train"
        detail = (
            f"step {step} is the last step of the run; to train further, raise trainer.max_steps "
            "or trainer.max_epochs"
        )
    elif step == lengths.n_steps:
        reason = f"{lengths.limit_kind} done"
        detail = lengths.limit
    elif any((timer.time_remaining() or 1.0) <= 0 for timer in timers):
        reason = "max_time"
    elif early:
        metric = early[0].monitor
        why = early[0].stopping_reason.name.lower().replace("_", " ")
        reason = "early stop"
        detail = f"{metric}={trainer.callback_metrics[metric]:.4g} {why}, {detail}"
    else:
        reason = "stopped"
        detail = f"by a callback or the module (trainer.should_stop), {detail}"
    return {"reason": reason, "detail": detail}

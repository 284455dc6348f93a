"""Where in a run Lightning's loops stand, told by two facts instead of thirty counters.

Lightning saves what each counter was in the middle of a hook, guesses from it where the save
happened, and goes on from there: a save after a validation, before it, or inside it differ by ones
in several places. A run here can only be interrupted after an optimizer step, so its number and
whether its validation is done say everything, on any number of ranks.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def loops_after(trainer: Trainer, step: int, validated: bool) -> dict[str, Any]:
    """State of the loops of a run that stands right after optimizer step `step`.

    Lightning then validates first where a validation is due and not done, and otherwise goes on
    with the next micro-batch; where the last step is done and validated there is nothing to do.

    Args:
        validated: false repeats a validation that was interrupted, from its first batch.
    """
    state = trainer.fit_loop.state_dict()
    n_batches = step * trainer.accumulate_grad_batches
    last = n_batches == len(trainer.datamodule.batches)
    done = last and (validated or not trainer.enable_validation)
    batches = counts(n_batches, ready=n_batches, started=n_batches, processed=n_batches)
    steps = counts(step, ready=step)
    begun = 0 if validated else 1  # one batch begun and not finished: an interrupted validation
    return state | {
        "epoch_progress": counts(int(done), ready=1, started=int(done), processed=int(done)),
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": batches | {"is_last_batch": last},
        "epoch_loop.scheduler_progress": steps,
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": steps, "zero_grad": counts(step, ready=step, started=step)}
        },
        "epoch_loop.val_loop.batch_progress": counts(0, ready=begun, started=begun, processed=0)
        | {"is_last_batch": False},
    }


def counts(completed: int, **earlier: int) -> dict[str, dict[str, int]]:
    """State of one of Lightning's trackers: in total, and in the one epoch there is."""
    tracker = {"completed": completed, **earlier}
    return {"total": dict(tracker), "current": dict(tracker)}

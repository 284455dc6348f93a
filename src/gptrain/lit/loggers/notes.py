"""Calls of the two methods that a logger may have in addition to those of Lightning's Logger."""

from lightning.pytorch import Trainer


def discard_after(trainer: Trainer, step: int) -> None:
    """Make the loggers remove earlier points after a step, which training will log again.

    Args:
        trainer: Trainer of the run.
        step: Number of optimizer steps after which training starts or resumes.
    """
    for logger in trainer.loggers:
        if discard := getattr(logger, "discard_after", None):
            discard(step)


def log_note(trainer: Trainer, name: str, text: str) -> None:
    """Pass a text of the current step to each logger that has a `log_note` method.

    Args:
        trainer: Trainer of the run.
        name: Name of the text, such as `sample`.
        text: Text of one or more lines.
    """
    for logger in trainer.loggers:
        if write_note := getattr(logger, "log_note", None):
            write_note(name, text, trainer.global_step)

"""Functions that call the loggers of a run where Lightning itself does not call them."""

from lightning.pytorch import Trainer

from gptrain.lit.lightning import values_to_log
from gptrain.lit.loggers.rows import RowLogger

STEP = "step"  # Lightning uses a logged value of this name as the x axis, and then logs no epoch


def discard_after(trainer: Trainer, step: int) -> None:
    """Make the loggers remove the points of all steps after a given one.

    A resumed run repeats these steps and logs them again. The method `discard_after` of each logger
    is called; loggers without this method are left out.

    Args:
        trainer: Trainer of the run.
        step: Number of optimizer steps after which training starts or resumes.
    """
    for logger in trainer.loggers:
        if discard := getattr(logger, "discard_after", None):
            discard(step)


def log_saved_step(trainer: Trainer) -> None:
    """Write the logged values of a step into the files of gptrain's loggers, before a save.

    Lightning passes the values of a step to the loggers after the save. A run that fails between
    the two would have no row of the step, because a resumed run begins with the next step. Only
    subclasses of RowLogger are called, which write the values of one step into one row even if they
    come twice. Does nothing if the step is not logged, and in a validation. All ranks must call it.

    Args:
        trainer: Trainer of the run.

    Raises:
        OSError: On rank 0, if a file cannot be written.
    """
    values = values_to_log(trainer) if trainer.training else {}
    if values.get(STEP) != trainer.global_step:
        return
    for logger in trainer.loggers:
        if isinstance(logger, RowLogger):
            logger.log_metrics(values, trainer.global_step)


def log_note(trainer: Trainer, name: str, text: str) -> None:
    """Pass a text to each logger that has a `log_note` method, with the number of steps done.

    Other loggers are left out.

    Args:
        trainer: Trainer of the run.
        name: Name of the text, such as `sample`.
        text: Text of one or more lines.
    """
    for logger in trainer.loggers:
        if write_note := getattr(logger, "log_note", None):
            write_note(name, text, trainer.global_step)

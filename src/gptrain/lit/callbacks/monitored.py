"""Early search for callbacks and schedules that monitor a value which the run does not log."""

import inspect
import logging
import re
import sys
from collections.abc import Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from gptrain.lit.lightning import callbacks_of, names_logged_in_training

log = logging.getLogger(__name__)
LIBRARIES = ("gptrain.", "lightning.", "torch.", "builtins")  # modules whose logging is known
# An argument or an entry such as monitor="val/loss" in the source of a class.
MONITOR_ARGUMENT = re.compile(r"""monitor["']?\s*[:=]\s*["'][^"']*["']""")
FROM_LIGHTNING = {"epoch", "step"}  # names that ModelCheckpoint finds without any log


class MissingMonitorError(Exception):
    """Raised if a callback or a schedule monitors a value that the run does not log.

    Args:
        part: Class name of the callback or the schedule.
        name: Monitored name.
        logged: Names that are logged, sorted.

    Attributes:
        name: Monitored name.
        logged: Names that are logged, sorted.
    """

    def __init__(self, part: str, name: str, logged: list[str]) -> None:
        super().__init__(f"{part} monitors {name}, and no value of this name is logged")
        self.name = name
        self.logged = logged


class MonitoredNames:
    """Early check that the values which callbacks and schedules monitor are logged.

    `after_first_step` raises an error if a value that Lightning requires was logged neither by the
    sanity check nor by the first step of this start. If the user's code may log the value later,
    a warning is logged instead. Lightning itself would look for the value at its first use, which
    may be hours after the start.

    Without a sanity check (trainer.num_sanity_val_steps=0, or a resumed run) nothing is checked.
    """

    def __init__(self) -> None:
        self._evaluated: set[str] | None = None  # names logged by the sanity check

    def after_sanity_check(self, trainer: Trainer) -> None:
        """Remember the names that the sanity check has logged."""
        self._evaluated = set(trainer.callback_metrics)

    def after_first_step(self, trainer: Trainer) -> None:
        """Check all monitored names. Call it after all hooks of the first step.

        A missing name is only a warning on rank 0 if the user's code may log it later, for example
        in a real validation only. Does nothing if there was no sanity check, and in later calls.

        Raises:
            MissingMonitorError: On all ranks, if a name was logged neither by the sanity check nor
                by the first step, and no code of the user may log it later.
        """
        if self._evaluated is None:
            return
        logged = self._evaluated | names_logged_in_training(trainer)
        self._evaluated = None
        for part, name in monitored_names(trainer):
            if name in logged | FROM_LIGHTNING:
                continue
            error = MissingMonitorError(part, name, sorted(logged))
            if not may_log_later(trainer, name):
                raise error
            if trainer.is_global_zero:
                log.warning("warning: %s so far; logged: %s", error, ", ".join(error.logged))


def monitored_names(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield class name and monitored name of each callback or schedule that needs the logged value.

    These are ModelCheckpoint with a `monitor`, and EarlyStopping and ReduceLROnPlateau with
    `strict=True`: Lightning raises an error if their value was not logged.
    """
    for callback in callbacks_of(trainer):
        is_strict = not isinstance(callback, EarlyStopping) or callback.strict
        name = None
        if isinstance(callback, ModelCheckpoint | EarlyStopping) and is_strict:
            name = callback.monitor
        if name is not None:
            yield type(callback).__name__, name
    for scheduled in trainer.lr_scheduler_configs:
        if scheduled.reduce_on_plateau and scheduled.strict:
            yield type(scheduled.scheduler).__name__, str(scheduled.monitor)


def may_log_later(trainer: Trainer, name: str) -> bool:
    """Return whether a module or a callback of the user may log a name after the first step.

    This is assumed of a class from outside of gptrain, Lightning and torch if it overrides
    on_train_epoch_end, or if the file of its source contains `sanity_checking`, or contains the
    name in quotes other than as the value of `monitor`. It is also assumed without a source file.

    Args:
        trainer: Trainer of the run.
        name: Monitored name.
    """
    for part in (trainer.lightning_module, *callbacks_of(trainer)):
        classes = [c for c in type(part).__mro__ if not c.__module__.startswith(LIBRARIES)]
        if classes and is_overridden("on_train_epoch_end", part):
            return True
        for user_class in classes:
            try:
                source = inspect.getsource(sys.modules[user_class.__module__])
            except (OSError, TypeError):  # a class without a source file
                return True
            source = MONITOR_ARGUMENT.sub("", source)
            if any(text in source for text in (f'"{name}"', f"'{name}'", "sanity_checking")):
                return True
    return False

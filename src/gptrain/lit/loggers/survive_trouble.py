"""What a logger does when it cannot write."""

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)
WRITES = ("log_metrics", "log_hyperparams", "log_note", "go_on_from", "save", "finalize")


class SurvivesTrouble:
    """Mixed into a logger: a full disk costs points of a curve, never the run; one warning."""

    broken = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in WRITES:
            if hasattr(cls, name):
                setattr(cls, name, _survives(getattr(cls, name)))


def _survives(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if self.broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            trouble: BaseException | None = error
            while trouble is not None and not isinstance(trouble, OSError):
                trouble = trouble.__cause__  # Lightning's TensorBoardLogger makes ValueErrors of it
            if trouble is None:
                raise
            self.broken = True
            log.warning("%s stops: %s; training goes on", type(self).__name__, trouble)
            return None

    return guarded

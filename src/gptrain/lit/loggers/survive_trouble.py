"""What a logger does when it cannot write."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


def survives_trouble(method: Callable[..., Any]) -> Callable[..., Any]:
    """A log folder that is full or gone costs points of a curve, never the run: one warning."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if self.broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            trouble = refusal(error)
            if trouble is None:
                raise
            self.broken = True
            log.warning("%s stops: %s; training goes on", type(self).__name__, trouble)
            return None

    return guarded


def refusal(error: BaseException | None) -> OSError | None:
    """The OSError that an error comes from; Lightning's TensorBoardLogger makes ValueErrors of it.

    None where there is none: such an error is no trouble with a disk.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error

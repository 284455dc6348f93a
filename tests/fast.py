"""What makes a process of the tests fast, and changes nothing that the tests show."""

from __future__ import annotations

import gc
import os
from functools import cache

from tests import composed_once
from tests.unchanged import restore_after_commands


@cache
def make_fast() -> None:
    """Cache yaml files, wait for no disk, and restore what a command changes in this process.

    What is imported is excluded from garbage collection.
    A test that cuts the power replaces `os.fsync` by a function of its own.
    """
    composed_once.compose_once()
    restore_after_commands()
    os.fsync = lambda _: None
    gc.freeze()


def some_flops_per_s(*_: object) -> float:
    """Return a speed, in FLOP/s, that a run would measure for longer than it trains."""
    return 1e10

"""What makes a process of the tests fast, and changes nothing that the tests show."""

from __future__ import annotations

import gc
import os

from tests import composed_once
from tests.unchanged import restore_after_commands


def make_fast(composed: dict[tuple, bytes] | None = None) -> None:
    """Cache yaml files, wait for no disk, and restore what a command changes in this process.

    What is imported is excluded from garbage collection.
    A test that cuts the power replaces `os.fsync` by a function of its own.

    Args:
        composed: What the process that starts this one has cached (`composed_once.made`).
    """
    composed_once.compose_once()
    restore_after_commands()
    composed_once.made.update(composed or {})
    os.fsync = lambda _: None
    gc.freeze()


def some_flops_per_s(*_: object) -> float:
    """Return a speed, in FLOP/s, that a run would measure for longer than it trains."""
    return 1e10

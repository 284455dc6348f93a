"""How far long work has come, for a person who waits for it at a terminal."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


def progress_bar(what: str, n_bytes: int) -> tqdm:
    """A bar over bytes, which `update` moves on; gone when it is closed.

    Shown after two seconds, in a terminal alone: a file gets nothing of it. Of several ranks the
    first one shows it.
    """
    from tqdm import tqdm  # here: the planner shows no bar, and needs Hydra and pydantic alone

    tqdm.set_lock(threading.RLock())  # its own is a semaphore that a killed process leaks
    is_first = os.environ.get("RANK", "0") == "0"
    return tqdm(
        desc=what, total=n_bytes, unit="B", unit_scale=True, delay=2, leave=False,
        disable=None if is_first else True,
    )  # fmt: skip

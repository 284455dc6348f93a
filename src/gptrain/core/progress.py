"""A progress bar for long work on files, shown in a terminal only."""

import os
import threading
from typing import Any


def progress_bar(what: str, n_bytes: int) -> Any:
    """Return a tqdm bar on stderr, to be updated with numbers of bytes, and closed at the end.

    It appears after two seconds, and only on rank 0 (RANK is 0 or not set), if stderr is a
    terminal. `close` removes it from the screen.

    Args:
        what: Text in front of the bar.
        n_bytes: Number of bytes at the end.
    """
    from tqdm import tqdm  # imported late: an error of an option needs no bar

    tqdm.set_lock(threading.RLock())  # tqdm's default lock is a semaphore that a killed run leaks
    is_first = os.environ.get("RANK", "0") == "0"
    return tqdm(
        desc=what, total=n_bytes, unit="B", unit_scale=True, delay=2, leave=False,
        disable=None if is_first else True,
    )  # fmt: skip

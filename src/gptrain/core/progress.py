"""A progress bar for long work on files, shown in a terminal only."""

import os
import threading

from tqdm import tqdm


def progress_bar(what: str, n_bytes: int) -> tqdm:
    """Return a progress bar on stderr, to be updated with numbers of bytes, and closed at the end.

    It appears after two seconds, and only on rank 0 (RANK is 0 or not set), if stderr is a
    terminal. `close` removes it from the screen.

    Args:
        what: Text in front of the bar.
        n_bytes: Number of bytes at the end.
    """
    tqdm.set_lock(threading.RLock())  # tqdm's default lock is a semaphore that a killed run leaks
    return tqdm(
        desc=what, total=n_bytes, unit="B", unit_scale=True, delay=2, leave=False,
        disable=None if os.environ.get("RANK", "0") == "0" else True,
    )  # fmt: skip

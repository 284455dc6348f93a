"""A request to stop is a flag; what to do about it is decided at the next step boundary.

Handlers run between any two instructions, on whichever ranks the signal happened to reach, so
nothing collective, no saving and no exception can start there. The loop asks the flag, the ranks
agree, and then they save together.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from gptrain.core.errors import FAILED, INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SLURM warns by USR1
# A terminal's Ctrl-C reaches the whole process group, and torchrun's agent passes it on at once:
# two signals, one request. A hand needs longer for two.
SAME_REQUEST_S = 0.3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StopFlag:
    """Set by SIGTERM, SIGINT and SIGUSR1 while it is installed; a second SIGINT ends the process.

    Install it on the main thread, after anything else that handles signals: the last one wins.
    Where the main thread is in a C++ call that does not return, only SIGQUIT (Ctrl-\\) ends it.

    Attributes:
        signal: name of the first signal, None as long as none came.
        error: raised by a signal, where nothing is at stake and a long wait would be in vain.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.error: BaseException | None = None
        self._interrupted_s: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def set(self, reason: str) -> None:
        """Asks for a stop without a signal: a time limit, another rank's request."""
        self.signal = self.signal or reason

    def install(self) -> "StopFlag":
        """Takes the signals, those held back included; again, to take them back from others."""
        for number in SIGNALS:
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, previous)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __enter__(self) -> "StopFlag":
        return self.install()

    def __exit__(self, *_: object) -> None:
        """Puts the previous handlers back."""
        for number, previous in self._previous.items():
            signal.signal(number, previous or signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            now_s = time.monotonic()
            self._interrupted_s = self._interrupted_s or now_s
            if now_s - self._interrupted_s > SAME_REQUEST_S:
                os.write(2, b"interrupted twice: leaving at once, nothing is saved\n")
                os._exit(INTERRUPTED)
        self.set(signal.Signals(number).name)
        if self.error is not None:
            raise self.error


@contextmanager
def block_stop_signals() -> Generator[None, None, None]:
    """No stop signal reaches this thread, nor the processes that it starts meanwhile.

    A child keeps them waiting until it has handlers of its own: there is no moment at which a
    signal would simply end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """Ends this process by a signal when its parent dies, however it dies (Linux; else: Guard).

    Call it first of all in a started process, with the number the parent had when it started it.
    The kernel means the *thread* that started the process: it must live as long as the child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(FAILED)


def ignore_in_worker(parent_pid: int, _worker_id: int = 0) -> None:
    """A data worker leaves when its rank ends it or dies, not when a signal reaches the group.

    One that outlived its rank would keep the rank's connections open, and the other ranks waiting.

    Args:
        parent_pid: the rank, read before it started the worker: read here, it may be the process
            that adopted an orphan. DataLoader's own check of its parent has that gap.
    """
    die_with_parent(parent_pid)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """For atexit: multiprocessing ends daemons by SIGTERM, which data workers ignore, and waits."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # that of torch would raise
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()

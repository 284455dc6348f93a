"""A request to stop is a flag; what to do about it is decided at the next step boundary.

Handlers run between any two instructions, on whichever ranks the signal happened to reach, so
nothing collective, no saving and no exception can start there. The loop asks the flag, the ranks
agree, and then they save together.

A second Ctrl-C must work even where the main thread sits in a C++ call and Python handlers cannot
run. The interpreter's wake-up descriptor is written by the C handler at once; a thread reads it.
"""

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gptrain.resilience.watchdog import die_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SLURM warns by USR1
EXIT_INTERRUPTED_TWICE = 130
# A terminal's Ctrl-C reaches the whole process group, and torchrun's agent passes it on at once:
# two signals, one wish. A hand needs longer for two.
SAME_WISH_S = 0.3
_open_pipes: set[int] = set()


class StopFlag:
    """Set by SIGTERM, SIGINT and SIGUSR1 while it is installed; a second SIGINT ends the process.

    Install it on the main thread, after anything else that handles signals: the last one wins.

    Attributes:
        signal: name of the first signal, None as long as none came.
        error: raised by a signal, where nothing is at stake and a long wait would be in vain.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.error: BaseException | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._wake_up: tuple[int, int] | None = None  # previous descriptor, ours

    def __bool__(self) -> bool:
        return self.signal is not None

    def set(self, reason: str) -> None:
        """Ask for a stop without a signal: a time limit, a word of another rank."""
        self.signal = self.signal or reason

    def install(self) -> "StopFlag":
        """Take the signals, those held back included; again, to take them back from others."""
        for number in SIGNALS:
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, previous)
        if self._wake_up is None:
            _forget_in_forked_children()
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            _open_pipes.update((reader, writer))
            self._wake_up = signal.set_wakeup_fd(writer, warn_on_full_buffer=False), writer
            threading.Thread(
                target=_count_interrupts, args=(reader,), name="interrupts", daemon=True
            ).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def restore(self) -> None:
        """Put the previous handlers back."""
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
        if self._wake_up is not None:
            previous, writer = self._wake_up
            self._wake_up = None
            signal.set_wakeup_fd(previous)
            if writer in _open_pipes:
                _open_pipes.discard(writer)
                os.close(writer)  # ends the thread

    def __enter__(self) -> "StopFlag":
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _handle(self, number: int, _frame: object) -> None:
        self.set(signal.Signals(number).name)
        if self.error is not None:
            raise self.error


@contextmanager
def hold_back() -> Iterator[None]:
    """No stop signal reaches this thread, nor the processes that it starts meanwhile.

    A child keeps them waiting until it has handlers of its own: there is no moment at which a
    signal would simply end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_in_worker(parent_pid: int, _worker_id: int = 0) -> None:
    """A data worker leaves when its rank says so or dies, not when a signal reaches the group.

    For DataLoader's worker_init_fn. SIGINT and SIGUSR1 are ignored. SIGTERM counts only from the
    parent, which ends its workers that way: who sent it is seen where it is waited for (Linux).
    A worker that outlived its rank would keep the rank's connections open, and the other ranks
    waiting.

    Args:
        parent_pid: the rank, as itself said before it started the worker. Asked here, the answer
            may be who adopted an orphan; DataLoader's own check of its parent has that gap.
    """
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(
        target=_leave_when_told, args=(parent_pid,), name="sigterm", daemon=True
    ).start()


def _leave_when_told(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _count_interrupts(reader: int) -> None:
    first_s = None
    while received := os.read(reader, 64):
        if signal.SIGINT not in received:
            continue
        if first_s is None:
            first_s = time.monotonic()
        elif time.monotonic() - first_s >= SAME_WISH_S:
            os.write(2, b"interrupted twice: leaving at once, nothing is saved\n")
            os._exit(EXIT_INTERRUPTED_TWICE)
    _open_pipes.discard(reader)
    os.close(reader)


@functools.cache
def _forget_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    if _open_pipes:  # a signal to the child would be counted as one to the parent
        signal.set_wakeup_fd(-1)
    while _open_pipes:
        os.close(_open_pipes.pop())

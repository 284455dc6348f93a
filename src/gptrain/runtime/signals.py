"""Signals that ask a run to stop, and the end of processes whose parent has died.

A signal handler runs between any two instructions, and only on the ranks that got the signal. So it
must not start a collective operation or a save. It sets a `StopFlag`. The training loop reads the
flag after each step, the ranks agree to stop, and then they save together.
"""

import ctypes
import multiprocessing
import os
import signal
import stat
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from gptrain.core.errors import FAILED, INTERRUPTED

# SLURM announces a time limit by SIGUSR1, and a terminal sends SIGHUP when it is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Ctrl-C in a terminal reaches the whole process group, and torchrun's agent forwards the signal at
# once. A rank gets two signals for this one request. Pressing Ctrl-C twice takes longer.
SAME_REQUEST_S = 0.3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StopFlag:
    """Flag that becomes true when the run is asked to stop by one of SIGNALS.

    A second SIGINT, more than 0.3 s after the first, ends the process with exit code 130 at once,
    without a checkpoint. Install the handlers on the main thread, after all other code that
    installs signal handlers; a `with` block installs them and restores the previous ones. While the
    main thread is in a C++ call that does not return, no handler runs, and only SIGQUIT
    (Ctrl+backslash) ends the process. A rank then prints its stacks.

    Attributes:
        signal: Name of the first signal, or another reason to stop. None if the run was not asked
            to stop.
        error: Exception that the handler raises while there is nothing to save. Usually None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.error: BaseException | None = None
        self._interrupted_s: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def set(self, reason: str) -> None:
        """Make the flag true without a signal. An earlier reason is kept.

        Args:
            reason: Reason to stop, which becomes the attribute `signal`.
        """
        self.signal = self.signal or reason

    def install(self) -> "StopFlag":
        """Install the handlers of SIGNALS, unblock the signals; return self.

        A SIGHUP that is ignored stays so, because `nohup` lets a run outlive its terminal. A signal
        that arrived while it was blocked (`block_stop_signals`) is handled now. Call `install`
        again if other code has installed handlers meanwhile. `__exit__` restores the handlers that
        the first call found.
        """
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, previous)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __enter__(self) -> "StopFlag":
        return self.install()

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that the first call of `install` found."""
        for number, previous in self._previous.items():
            signal.signal(number, previous or signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, _frame: object) -> None:
        """Handle a signal: make the flag true, or end the process at the second SIGINT.

        After a SIGHUP, output to the terminal that was closed is discarded. A SIGINT within 0.3 s
        of the first one counts as the same request.

        Args:
            number: Number of the signal.

        Raises:
            BaseException: The attribute `error`, if it is set, wherever the main thread is.
        """
        if number == signal.SIGINT:
            now_s = time.monotonic()
            self._interrupted_s = self._interrupted_s or now_s
            if now_s - self._interrupted_s > SAME_REQUEST_S:
                os.write(2, b"interrupted twice: exiting at once without saving\n")
                os._exit(INTERRUPTED)
        if number == signal.SIGHUP:
            leave_closed_terminal()
        self.set(signal.Signals(number).name)
        if self.error is not None:
            raise self.error


def leave_closed_terminal() -> None:
    """Connect stdout and stderr with /dev/null, if they were a terminal that is closed.

    Otherwise each write would raise an OSError, at last that of Python's end, with exit code 120.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        with suppress(OSError):  # the stream is closed
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                os.dup2(null, fd)
    os.close(null)


@contextmanager
def block_stop_signals() -> Generator[None, None, None]:
    """Block the stop signals in this thread and in the processes that it starts within the block.

    The stop signals are SIGNALS. A blocked signal waits. A rank unblocks the signals after it has
    installed its own handlers, so that a signal at its start cannot end the process by the default
    action.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when its parent dies (on Linux only).

    Call it at the start of a child process. If the parent is gone by then, this process ends at
    once with exit code 70. The kernel watches the thread that started this process, so this thread
    must live as long as the child. On other systems the watchdog of a rank ends the rank instead.

    Args:
        parent_pid: Process number of the parent when it started this process.
        by: Signal to send. SIGKILL ends this process; SIGTERM asks a run to save and stop.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:  # the parent died before prctl was called
        os._exit(FAILED)


def ignore_in_worker(parent_pid: int, _worker_id: int = 0) -> None:
    """Make a data worker ignore the stop signals, and end when its rank dies.

    The rank itself ends its workers after it has saved. A worker that outlives its rank would keep
    the rank's connections open, so that other ranks would wait for the dead rank. Call it in the
    worker, as DataLoader's `worker_init_fn`.

    Args:
        parent_pid: Process number of the rank, read before it started the worker. In the worker,
            os.getppid() may be the number of another process, if the rank has died already.
        _worker_id: Number of the worker, which DataLoader passes. Not used.
    """
    die_with_parent(parent_pid)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """Kill the data workers of this process when it ends. Register this function with atexit.

    multiprocessing itself would end the workers by SIGTERM, which they ignore, and wait forever.
    Only daemonic child processes count as workers. Also removes the handler of SIGCHLD.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for a killed worker
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()

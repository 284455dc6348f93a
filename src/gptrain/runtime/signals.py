"""Signals that ask a run to stop.

A signal handler runs between any two instructions, and only on the ranks that got the signal. So it
must not start a collective operation or a save. It sets a `StopFlag`. The training loop reads the
flag after each step, the ranks agree to stop, and then they save together.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from gptrain.core.errors import INTERRUPTED

# SLURM announces a time limit by SIGUSR1, and a terminal sends SIGHUP when it is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Ctrl-C in a terminal reaches the whole process group, and a launcher may forward the signal at
# once. A rank gets two signals for this one request. Pressing Ctrl-C twice takes longer.
SAME_REQUEST_S = 0.3


class StopFlag:
    """Flag that becomes true when the run is asked to stop by one of SIGNALS, while it is entered.

    A second SIGINT, more than 0.3 s after the first, exits with code 130 at once. While the main
    thread is in a C++ call no handler runs, and only SIGQUIT (Ctrl+backslash) ends the process. A
    SIGHUP that is ignored stays so, because `nohup` lets a run outlive its terminal. Only the main
    thread can enter it.

    `signal` is the name of the first signal, or None. `error`, if set, makes the exception that the
    handler raises, once, while there is nothing to save.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.error: Callable[[signal.Signals], BaseException] | None = None
        self._interrupted_s: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopFlag":
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous or signal.SIG_DFL)

    def _handle(self, number: int, _frame: object) -> None:
        """Handle a signal: make the flag true, or end the process at the second SIGINT."""
        if number == signal.SIGINT:
            now_s = time.monotonic()
            self._interrupted_s = self._interrupted_s or now_s
            if now_s - self._interrupted_s > SAME_REQUEST_S:
                os.write(2, b"interrupted twice: exiting at once without saving\n")
                os._exit(INTERRUPTED)
        self.signal = self.signal or signal.Signals(number).name
        error, self.error = self.error, None
        if error is not None:
            raise error(signal.Signals(number))


def ignore_in_worker(_worker_id: int = 0) -> None:
    """Make a data worker, as its `worker_init_fn`, ignore SIGTERM, SIGINT, SIGUSR1 and SIGHUP.

    Its rank gets the same signals, saves, and then ends its workers.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """Kill the data workers of this process, and its other daemonic multiprocessing children.

    Waits at most ten seconds for the end of each. Call it in the main thread, at the end of a run
    and by atexit: multiprocessing would end the workers by SIGTERM, which they ignore, and wait
    forever. torch would wait ten seconds for each worker of a loader that is collected as garbage.
    """
    # torch's handler raises for a killed worker.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
            child.join(10)
    signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)

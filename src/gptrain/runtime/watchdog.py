"""Heartbeats, which count the time of each phase, and end a rank that makes no progress.

A hang of one rank lets the collectives of the other ranks wait, which torch ends after
`strategy.timeout_s`. The thread of this module ends a rank by os._exit, because no exception
reaches a main thread that is stuck in a collective. It cannot run while a C function keeps the
interpreter lock: then the timeouts of the other ranks end the job. A person can always send
SIGQUIT: Ctrl+backslash prints the stacks of all ranks and ends them.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gptrain.checkpoints.status import PreemptedError
from gptrain.core.errors import FAILED, HUNG, Ending
from gptrain.runtime.signals import StopFlag

POLL_S = 0.5  # interval at which the thread looks at the heartbeats


@dataclass(eq=False)
class Guard:
    """Watchdog of one rank: a context manager around the training function.

    After too long a time without `beat` it reports the hang and ends the process with exit code 76.
    Time in which the process was stopped (Ctrl-Z, a suspended laptop) does not count.

    Attributes:
        stop: Flag that is true once the run was asked to stop. Its signal handlers are installed
            by the caller.
        rank: Global rank of this process.
        timeout_s: Longest time until the next heartbeat of the main thread, in seconds, unless a
            heartbeat allows more.
        report: Function (ending, rank, step) that prints why the process ends and writes it to
            status.json.
        step: Optimizer step of the last heartbeat.
        phase: Phase of the run that the last heartbeat has named, for example "train" or "save".
        allow_s: Time that the last heartbeat allows until the next one, if it is longer than the
            timeout. In seconds.
        phase_s: Phase -> seconds until the last heartbeat, over all starts of the run on rank 0.
    """

    stop: StopFlag
    rank: int
    timeout_s: float
    report: Callable[[Ending, int, int], object]
    step: int = 0
    phase: str = "start"
    allow_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._silent_s = 0.0
        self._beat_s = time.monotonic()  # time of the last heartbeat
        # An agent of torchrun ends its ranks. If it was killed, they end by themselves. A shell or
        # a script that has started a rank may end before the rank.
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Guard":
        faulthandler.register(signal.SIGQUIT, file=2, chain=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGQUIT)

    def beat(self, step: int | None = None, phase: str | None = None, allow_s: float = 0.0) -> None:
        """Record that the main thread has made progress.

        `allow_s` is the longest time until the next heartbeat, in seconds, if the phase may take
        longer than the timeout, such as a compilation. Step and phase stay if they are None. The
        time since the last heartbeat belongs to the phase until now, in `phase_s`.
        """
        now_s = time.monotonic()
        self.phase_s[self.phase] = self.phase_s.get(self.phase, 0.0) + now_s - self._beat_s
        self._beat_s = now_s
        self.step = self.step if step is None else step
        self.phase = phase or self.phase
        self.allow_s = allow_s
        self._silent_s = 0.0

    @contextmanager
    def during(self, phase: str, allow_s: float) -> Generator[None, None, None]:
        """Make the block a phase, within which no heartbeat is due for `allow_s` seconds.

        The phase before it goes on afterwards. A block that raises an error ends the run, so its
        phase stays the current one.
        """
        outer = self.phase
        self.beat(phase=phase, allow_s=allow_s)
        yield
        self.beat(phase=outer)

    def leave_if_asked(self) -> None:
        """Raise a PreemptedError if this rank was asked to stop. For phases without a save."""
        if self.stop:
            raise PreemptedError

    @contextmanager
    def nothing_to_save(self) -> Generator[None, None, None]:
        """End the block at once, by a PreemptedError, when this rank is or was asked to stop.

        The handler of `stop` raises it in the main thread at any place, for example while a corpus
        is tokenized. Use it only where there is nothing to save.
        """
        # Before the check: a signal may come just after it.
        self.stop.error = lambda _: PreemptedError()
        try:
            self.leave_if_asked()
            yield
        finally:
            self.stop.error = None

    def _watch(self) -> None:
        """Watch the main thread until the training function has ended. Runs in its own thread."""
        while not self._done.wait(POLL_S):
            is_orphan = self._agent is not None and os.getppid() != self._agent
            # A scheduler's signal may end the agent, too, while this rank saves. After a first
            # Ctrl-C, which the agent has sent on, the second one has ended it.
            if is_orphan and self.stop.signal in (None, "SIGINT"):
                message = "error: the process that has started this rank has ended"
                self._leave(Ending(FAILED, "error", message))
            self._silent_s += POLL_S
            limit_s = max(self.timeout_s, self.allow_s)
            if self._silent_s > limit_s:
                where = f"rank {self.rank} at step {self.step} in phase {self.phase}"
                message = f"error: no progress for {limit_s:.0f} s: {where}"
                self._leave(Ending(HUNG, "hang", message))

    def _leave(self, ending: Ending) -> None:
        """Print the stacks of all threads, report an ending, and end this process."""
        faulthandler.dump_traceback(file=2)
        try:
            self.report(ending, self.rank, self.step)
        finally:
            os._exit(ending.code)

"""All that watches over one rank while it trains."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gptrain.resilience.ends import Preempted
from gptrain.resilience.heartbeat import Heartbeat
from gptrain.resilience.signals import StopFlag
from gptrain.resilience.watchdog import Watchdog


class Guard:
    """A context around the training function: signals are flags, beats are told, nothing hangs.

    Attributes:
        stop: true once somebody asked the run to stop.
        heartbeat: to be told of every step.
        doing: what was being done when an exception came, for its report.

    Args:
        beats: folder of the signs of life, shared by the ranks.
        timeout_s: without a sign of life the rank is hung.
        parent_pid: the supervisor that must live; None where nobody started this process.
        about: what to add to the status of a hang.
        stop: the flag, where this process has one already.
    """

    def __init__(
        self,
        run_dir: str | Path,
        beats: str | Path,
        *,
        rank: int,
        timeout_s: float,
        parent_pid: int | None = None,
        about: Callable[[], dict] = dict,
        stop: StopFlag | None = None,
    ) -> None:
        self.stop = StopFlag() if stop is None else stop
        self.heartbeat = Heartbeat(beats, rank)
        self.doing = ""
        self._watchdog = Watchdog(
            self.heartbeat, run_dir, timeout_s=timeout_s, parent_pid=parent_pid, about=about
        )

    def __enter__(self) -> "Guard":
        with ExitStack() as stack:
            stack.callback(self.heartbeat.close)
            stack.enter_context(self.stop)
            stack.enter_context(self._watchdog)
            self._stack = stack.pop_all()
        return self

    def leave_if_asked(self) -> None:
        """Where nothing of this start is worth saving. Raises: Preempted."""
        if self.stop:
            raise Preempted

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """A request to stop, earlier or now, ends the block at once, whatever it is doing.

        Raises: Preempted.
        """
        self.leave_if_asked()
        self.stop.error = Preempted()
        try:
            yield
        finally:
            self.stop.error = None

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

"""No rank waits for ever: a thread in every rank that ends it when waiting has become pointless.

Three reasons: the process that started it is gone (an orphan), a rank has failed (the others'
collectives will never come), or nothing has moved for the timeout (a hang). It ends the process by
os._exit: the main thread is stuck in a collective that no exception can reach.

Against what stops this thread too there are two more layers: faulthandler's own thread needs no
interpreter lock and prints the stacks, and a supervisor with a `StallWatch` ends the process from
outside. A rank that a signal has stopped is named by the others.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gptrain.resilience.heartbeat import Heartbeat, read_lives
from gptrain.resilience.status import STATUS_NAME, read_status, write_status

EXIT_HANG = 76
EXIT_FAILURE = 70
GRACE_S = 5.0  # for a rank to end by itself after another has failed
_NOT_FAILURES = (0, 75)  # done, preempted: the others end by themselves
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAX_GAP_S = 2.0  # more between two looks means that this process was stopped: not its waiting


def die_with_parent(parent_pid: int) -> None:
    """End this process when its parent dies, however that dies (Linux; elsewhere see Watchdog).

    Call it first of all in a started rank, with the number the parent had when it started it. The
    kernel means the *thread* that started the process: it must live as long as the ranks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(EXIT_FAILURE)


class Watchdog:
    """Ends this rank when its parent is gone, a rank has failed, or nothing moves.

    Stop it before the heartbeat is closed.

    Args:
        timeout_s: how long the main thread may go without a beat.
        parent_pid: the supervisor that must live; None where nobody started us (a shell may go).
        about: what to add to the status of a hang: checkpoint, resume.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        run_dir: str | Path,
        *,
        timeout_s: float,
        parent_pid: int | None = None,
        poll_s: float = 0.5,
        about: Callable[[], dict] = dict,
    ) -> None:
        self.heartbeat, self.run_dir = heartbeat, Path(run_dir)
        self.timeout_s, self.parent_pid = timeout_s, parent_pid
        self.poll_s, self.about = poll_s, about
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._seen_status = self._status_mark()  # an earlier attempt's is not news

    def start(self) -> "Watchdog":
        """Begin to watch."""
        self._arm(self.timeout_s)
        self._thread.start()
        return self

    def stop(self) -> None:
        """The rank is done."""
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def __enter__(self) -> "Watchdog":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self) -> None:
        beats, silent_s, looked_s = self.heartbeat.beats, 0.0, time.monotonic()
        while not self._done.wait(self.poll_s):
            self._tick()
            limit_s = max(self.timeout_s, self.heartbeat.allow_s)
            self._arm(limit_s)
            now_s = time.monotonic()
            elapsed_s, looked_s = min(now_s - looked_s, _MAX_GAP_S), now_s
            silent_s = 0.0 if self.heartbeat.beats != beats else silent_s + elapsed_s
            beats = self.heartbeat.beats
            if self.parent_pid is not None and os.getppid() != self.parent_pid:
                self._leave("the process that started it is gone", EXIT_FAILURE)
            elif (status := self._news()) is not None:
                self._leave_after(status)
            elif silent_s > limit_s:
                self._hang(beats, silent_s)

    def _leave_after(self, status: dict) -> None:
        """Of this rank's own failure, too: what it does to end may wait for the others."""
        reason = f"rank {status['rank']} has failed ({status['cause']})"
        if status["exit_code"] == EXIT_HANG:
            self._leave(reason, EXIT_HANG, stacks=True)
        if not self._done.wait(GRACE_S):
            self._leave(reason, status["exit_code"])

    def _hang(self, beats: int, silent_s: float) -> None:
        rank, where = self._suspect()
        if self.heartbeat.beats != beats:  # at the last moment
            return
        message = f"no progress for {silent_s:.0f} s; {where}"
        self._say(message, stacks=True)
        with contextlib.suppress(OSError):  # a full disk must not keep a hung rank alive
            write_status(
                self.run_dir,
                cause="hang",
                exit_code=EXIT_HANG,
                rank=rank,
                step=self.heartbeat.step,
                message=message,
                **self.about(),
            )
        if not self._done.wait(2 * self.poll_s):  # the others see it and print their stacks, too
            os._exit(EXIT_HANG)

    def _suspect(self) -> tuple[int, str]:
        """The rank that the others wait for: one that does not tick, or the one furthest behind."""
        ticks = {life.rank: life.ticks for life in read_lives(self.heartbeat.folder)}
        for _ in range(4):  # the others may be looking at us
            time.sleep(self.poll_s)
            self._tick()
        lives = read_lives(self.heartbeat.folder)
        worst = min(lives, key=lambda life: (life.ticks != ticks.get(life.rank), life.step))
        how = "stopped" if worst.ticks == ticks.get(worst.rank) else "waiting"
        return worst.rank, f"rank {worst.rank} is {how} at step {worst.step}, phase {worst.phase}"

    def _news(self) -> dict | None:
        """The status of a failure, once it is there."""
        mark = self._status_mark()
        if mark == self._seen_status:
            return None
        self._seen_status = mark
        status = read_status(self.run_dir)
        return None if status is None or status["exit_code"] in _NOT_FAILURES else status

    def _arm(self, limit_s: float) -> None:
        """Print the stacks if this is not called again in time, lock or no lock."""
        faulthandler.dump_traceback_later(limit_s, file=2)

    def _tick(self) -> None:
        with contextlib.suppress(OSError):  # nothing may end this thread
            self.heartbeat.tick()

    def _status_mark(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.run_dir / STATUS_NAME)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _leave(self, reason: str, exit_code: int, stacks: bool = False) -> None:
        self._say(f"leaving: {reason}", stacks)
        os._exit(exit_code)

    def _say(self, message: str, stacks: bool) -> None:
        text = f"rank {self.heartbeat.rank}: {message}\n"
        os.write(2, text.encode())
        if stacks:
            faulthandler.dump_traceback(file=2)

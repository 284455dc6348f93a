"""No rank waits for ever: heartbeats of the ranks, and the watch over them in the rank and outside.

A beat says that the main thread got somewhere (a step, a validation batch, a piece of a file), a
tick only that the process runs. A rank that ticks and does not beat waits for somebody; one that
does neither is stopped, or holds the interpreter lock: it is the one the others wait for. Clocks of
two machines need not agree: a counter is compared with itself, a look before.

A thread in every rank ends it where waiting has become pointless: its parent is gone, a rank has
failed (the others' collectives will never come), or nothing has moved for the timeout. It ends it
by os._exit: no exception reaches a main thread that is stuck in a collective. Where this thread is
stopped, too, faulthandler's own thread, which needs no interpreter lock, prints the stacks, and a
supervisor with a `StallWatch` ends the process from outside.
"""

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptrain.checkpoints.status import Preempted, read_status, write_status
from gptrain.core.errors import DONE, FAILED, HUNG, PREEMPTED
from gptrain.runtime.signals import StopFlag

GRACE_S = 5.0  # for a rank to end by itself after another has failed
POLL_S = 0.5  # between two looks of a rank's guard
STOPPED_S = 3.0  # without a tick: longer than a busy machine keeps a process waiting
_MAX_GAP_S = 2.0  # a watcher looks more often than this; if not, it was stopped itself
_RECORD_BYTES = 200  # of one length: it covers what was there


@dataclass(frozen=True)
class Life:
    """The last heartbeat of one rank.

    Attributes:
        allow_s: until its next beat may come.
        silent_s: since its last beat, as a `StallWatch` saw it.
        stopped: its process does not even tick.
    """

    rank: int
    beats: int
    ticks: int
    phase: str
    step: int
    allow_s: float = 0.0
    silent_s: float = 0.0
    stopped: bool = False

    def __str__(self) -> str:
        how = "stopped" if self.stopped else "waiting"
        return f"rank {self.rank} is {how} at step {self.step}, phase {self.phase}"


class Heartbeat:
    """The heartbeat of this rank, a small file. A beat is one small write into the page cache."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        self.folder, self.rank = Path(folder), rank
        self.folder.mkdir(parents=True, exist_ok=True)
        self.beats, self.step, self.phase, self.allow_s, self._ticks = 0, 0, "start", 0.0, 0
        self._path = self.folder / f"rank-{rank:05d}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o644)
        self.beat()

    def beat(self, step: int | None = None, phase: str | None = None, allow_s: float = 0.0) -> None:
        """The main thread got on.

        Args:
            step, phase: where to; kept from the last beat if None.
            allow_s: how long the next beat may take, where that is longer than the timeout
                (compiling, one long call).
        """
        self.step = self.step if step is None else step
        self.phase, self.allow_s = phase or self.phase, allow_s
        self.beats += 1
        self._write()

    def tick(self) -> None:
        """The process runs."""
        self._ticks += 1
        with contextlib.suppress(OSError):  # a full disk must not end the thread that ticks
            self._write()

    def close(self) -> None:
        """The rank is done: no more is to be expected of it."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _write(self) -> None:
        # A tick may put an older beat back if a newer comes at that moment; the next tick repairs.
        record = json.dumps([self.beats, self._ticks, self.phase, self.step, self.allow_s])
        os.pwrite(self._descriptor, record.encode().ljust(_RECORD_BYTES), 0)


def read_lives(folder: str | Path) -> list[Life]:
    """The last heartbeat of every rank of the folder, in rank order."""
    lives = []
    for path in sorted(Path(folder).glob("rank-?????")):
        with contextlib.suppress(FileNotFoundError, ValueError):  # just finished, or not begun
            lives.append(Life(int(path.name[5:]), *json.loads(path.read_bytes())))
    return lives


class Silence:
    """How long a counter has stood still, without the time in which the watcher was stopped."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._looked_s = self._silent_s = 0.0

    def look(self, count: int, now_s: float) -> float:
        """Seconds for which the counter has had this value. Look at least every two seconds."""
        elapsed_s, self._looked_s = min(now_s - self._looked_s, _MAX_GAP_S), now_s
        self._silent_s = self._silent_s + elapsed_s if count == self._count else 0.0
        self._count = count
        return self._silent_s


class StallWatch:
    """Which ranks are silent for longer than they may be.

    Start a new one on an empty folder before ranks are started again.
    """

    def __init__(self, folder: str | Path, timeout_s: float, stopped_s: float = STOPPED_S) -> None:
        self.folder, self.timeout_s, self.stopped_s = Path(folder), timeout_s, stopped_s
        self._beats: dict[int, Silence] = defaultdict(Silence)
        self._ticks: dict[int, Silence] = defaultdict(Silence)

    def stalled(self) -> list[Life]:
        """The silent ranks, the one that the others most likely wait for first; mostly none.

        Ask at least every two seconds. Ranks of one step beat at different moments, so the first
        to have been silent for too long may be one that waits. A rank is late only after as long
        again as it takes to see that a process has stopped: then any that has is known.
        """
        stalls, any_late, now_s = [], False, time.monotonic()
        for life in read_lives(self.folder):
            silent_s = self._beats[life.rank].look(life.beats, now_s)
            stopped = self._ticks[life.rank].look(life.ticks, now_s) > self.stopped_s
            late = silent_s > max(self.timeout_s, life.allow_s) + self.stopped_s
            if late or stopped:
                stalls.append(replace(life, silent_s=silent_s, stopped=stopped))
            any_late |= late
        stalls.sort(key=lambda stall: (not stall.stopped, stall.step, -stall.silent_s))
        return stalls if any_late else []


class Guard:
    """A context around the training function: nothing in it waits for ever.

    Args:
        beats: folder of the heartbeats, shared by the ranks.
        stop: true once somebody asked the run to stop; the caller has installed it.
        timeout_s: how long the main thread may go without a beat.
        parent_pid: the supervisor that must live; None where nobody started us (a shell may go).
        about: what to add to the status of a hang: checkpoint, resume.

    Attributes:
        heartbeat: to be told of every step.
        doing: what was being done when an exception came, for its report.
    """

    def __init__(
        self,
        run_dir: str | Path,
        beats: str | Path,
        stop: StopFlag,
        *,
        rank: int,
        timeout_s: float,
        parent_pid: int | None = None,
        about: Callable[[], dict] = dict,
    ) -> None:
        self.stop, self.heartbeat, self.doing = stop, Heartbeat(beats, rank), ""
        self._run_dir, self._about = Path(run_dir), about
        self._timeout_s, self._parent_pid = timeout_s, parent_pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._old_status = read_status(run_dir)  # of an earlier attempt

    def __enter__(self) -> "Guard":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.heartbeat.close()

    def leave_if_asked(self) -> None:
        """Where nothing of this start is worth saving. Raises: Preempted."""
        if self.stop:
            raise Preempted

    @contextlib.contextmanager
    def nothing_to_save(self) -> Generator[None, None, None]:
        """A request to stop, earlier or now, ends the block at once. Raises: Preempted."""
        self.stop.error = Preempted()  # first: a signal may come just after the question
        try:
            self.leave_if_asked()
            yield
        finally:
            self.stop.error = None

    def _watch(self) -> None:
        silence, limit_s = Silence(), self._timeout_s
        while True:
            # Prints the stacks if it is not called again in time, interpreter lock or no lock.
            faulthandler.dump_traceback_later(limit_s, file=2)
            if self._done.wait(POLL_S):
                return
            self.heartbeat.tick()
            beats = self.heartbeat.beats
            limit_s = max(self._timeout_s, self.heartbeat.allow_s)
            silent_s = silence.look(beats, time.monotonic())
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                self._leave("the process that started it is gone", FAILED)
            elif (status := self._new_failure()) is not None:
                reason = f"rank {status.get('rank')} has failed ({status.get('cause')})"
                self._leave(reason, status["exit_code"])
            elif silent_s > limit_s:
                self._hang(beats, silent_s)

    def _new_failure(self) -> dict | None:
        """The status of a failure, this rank's own or another's, once it is there."""
        status = read_status(self._run_dir)
        ends_all = status is not None and status["exit_code"] not in (DONE, PREEMPTED)
        return status if ends_all and status != self._old_status else None

    def _leave(self, reason: str, exit_code: int) -> None:
        """Ends this rank: after a hang at once, else if it does not end by itself in a while."""
        is_hang = exit_code == HUNG
        if is_hang or not self._done.wait(GRACE_S):
            self._say(f"leaving: {reason}", stacks=is_hang)
            os._exit(exit_code)

    def _hang(self, beats: int, silent_s: float) -> None:
        stall = self._suspect()
        if self.heartbeat.beats != beats:  # at the last moment
            return
        message = f"no progress for {silent_s:.0f} s; {stall}"
        self._say(message, stacks=True)
        about: dict[str, Any] = {"cause": "hang", "exit_code": HUNG, "message": message}
        about |= {"rank": stall.rank, "step": self.heartbeat.step}
        with contextlib.suppress(OSError):  # a full disk must not keep a hung rank alive
            write_status(self._run_dir, **about | self._about())
        if not self._done.wait(2 * POLL_S):  # the others see it and print their stacks, too
            os._exit(HUNG)

    def _suspect(self) -> Life:
        """The rank that the others wait for: a stopped one, or the one furthest behind."""
        heart, stalls = self.heartbeat, []
        watch = StallWatch(heart.folder, 0.0, stopped_s=3 * POLL_S)
        for _ in range(5):  # the others may be looking at us
            heart.tick()
            stalls = watch.stalled() or stalls
            time.sleep(POLL_S)
        return stalls[0] if stalls else Life(heart.rank, heart.beats, 0, heart.phase, heart.step)

    def _say(self, message: str, stacks: bool) -> None:
        os.write(2, f"rank {self.heartbeat.rank}: {message}\n".encode())
        if stacks:
            faulthandler.dump_traceback(file=2)

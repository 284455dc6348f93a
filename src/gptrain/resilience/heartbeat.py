"""Signs of life of every rank, in one small file each, and who has stopped giving them.

A beat says: the main thread got somewhere (a step, a validation batch, a piece of a file). A tick
says only that the process runs. A rank that ticks and does not beat waits for somebody; one that
does neither is stopped, or holds the interpreter lock: it is the one the others wait for.

Nothing is compared but "has it changed since I last looked": clocks of two processes or machines
need not agree, and time in which the watcher itself was stopped does not count.
"""

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_BEAT = struct.Struct("<qqd24s")  # beats, step, seconds until the next may come, phase
_TICK = struct.Struct("<q")
_MAX_GAP_S = 2.0  # a watcher looks more often than this; if not, it was stopped itself
_MISSED_S = 1.0  # ticks come several times a second
_STOPPED_S = 3.0  # for longer than a busy machine keeps a process waiting


@dataclass(frozen=True)
class Life:
    """What one rank last said."""

    rank: int
    beats: int
    step: int
    allow_s: float
    phase: str
    ticks: int


@dataclass(frozen=True)
class Stall:
    """A rank that has been silent for longer than it may.

    Attributes:
        silent_s: since its last beat.   stopped: its process does not even tick.
    """

    rank: int
    step: int
    phase: str
    silent_s: float
    stopped: bool


class Heartbeat:
    """The signs of life of this rank. A beat is one small write into the page cache."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        self.folder, self.rank = Path(folder), rank
        self.beats, self.step, self.phase, self.allow_s = 0, 0, "start", 0.0
        self._ticks = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{rank:05d}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.tick()
        self.beat()

    def beat(self, step: int | None = None, phase: str | None = None, allow_s: float = 0.0) -> None:
        """The main thread got on.

        Args:
            step, phase: where to; kept from the last beat if None.
            allow_s: how long the next beat may take, where that is longer than the timeout
                (compiling, one long call). Until that next beat only.
        """
        self.step = self.step if step is None else step
        self.phase = phase or self.phase
        self.allow_s = allow_s
        self.beats += 1
        record = _BEAT.pack(self.beats, self.step, allow_s, self.phase.encode()[:24])
        os.pwrite(self._descriptor, record, 0)

    def tick(self) -> None:
        """The process runs."""
        self._ticks += 1
        os.pwrite(self._descriptor, _TICK.pack(self._ticks), _BEAT.size)

    def close(self) -> None:
        """No more signs of life are to be expected: the rank is done."""
        (self.folder / f"rank-{self.rank:05d}").unlink(missing_ok=True)
        os.close(self._descriptor)


class StallWatch:
    """For a supervisor: which ranks of a folder are silent for longer than they may be.

    Ask at least every two seconds. Before ranks are started again, start a new one on an empty
    folder.
    """

    def __init__(self, folder: str | Path, timeout_s: float) -> None:
        self.folder, self.timeout_s = Path(folder), timeout_s
        self._looked_s = time.monotonic()
        self._last: dict[int, Life] = {}
        self._beat_silence_s: dict[int, float] = {}
        self._tick_silence_s: dict[int, float] = {}

    def stalled(self) -> list[Stall]:
        """The silent ranks, the one that the others most likely wait for first.

        Ranks of one step beat at different moments, so the first to have been silent for too long
        may be one that waits. Whose process has stopped is among them, however late its last beat
        was, and as long as a rank may or may not have stopped, the answer is none.
        """
        now_s = time.monotonic()
        elapsed_s, self._looked_s = min(now_s - self._looked_s, _MAX_GAP_S), now_s
        silent_s, no_tick_s = self._beat_silence_s, self._tick_silence_s
        stalls, any_late, any_unclear = [], False, False
        for life in read_lives(self.folder):
            rank, last = life.rank, self._last.get(life.rank)
            beat = last is None or last.beats != life.beats
            tick = last is None or last.ticks != life.ticks
            silent_s[rank] = 0.0 if beat else silent_s[rank] + elapsed_s
            no_tick_s[rank] = 0.0 if tick else no_tick_s[rank] + elapsed_s
            self._last[rank] = life
            late = silent_s[rank] > max(self.timeout_s, life.allow_s)
            stopped = no_tick_s[rank] > _STOPPED_S
            if late or stopped:
                stalls.append(Stall(rank, life.step, life.phase, silent_s[rank], stopped))
            any_late |= late
            any_unclear |= no_tick_s[rank] > _MISSED_S and not stopped
        if any_unclear or not any_late:
            return []
        return sorted(stalls, key=lambda stall: (not stall.stopped, stall.step, -stall.silent_s))


def read_lives(folder: str | Path) -> list[Life]:
    """What every rank of the folder last said, in rank order."""
    lives = []
    for path in sorted(Path(folder).glob("rank-*")):
        try:
            record = path.read_bytes()
        except FileNotFoundError:  # it has just finished
            continue
        if len(record) == _BEAT.size + _TICK.size:
            beats, step, allow_s, phase = _BEAT.unpack_from(record)
            (ticks,) = _TICK.unpack_from(record, _BEAT.size)
            text = phase.rstrip(b"\0").decode(errors="replace")
            lives.append(Life(int(path.name[5:]), beats, step, allow_s, text, ticks))
    return lives

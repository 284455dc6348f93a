"""Record of how a run has spent its wall-clock time, over all of its starts: timeline.jsonl.

The launcher appends a line at each start. Rank 0 appends a line when a phase of the training ends,
and every UPDATE_S within a phase. A process that is killed loses at most UPDATE_S of this record.

Definitions, in seconds of wall-clock time, over all starts of one run folder:

    steps           optimizer steps that count: each step once, in the start whose result was kept
    validation      validations
    saves           training waits for a checkpoint or the mirror, and the end of the run
    starting        from the lock of the run folder, when the checkpoint to resume from is known,
                    to the end of the first step: data, building, loading, compilation
    redone          optimizer steps after the checkpoint from which a later start resumed. Their
                    result was lost, and the later start did them again
    between_starts  from the last line of a start to the beginning of the next start: the time in
                    which nothing ran, the work of a killed process since its last line, and the
                    first imports. The time after a run has reached its own end is not counted

    goodput = steps / (sum of all six)
"""

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from gptrain.checkpoints.files import Row, append_row, read_rows

TIMELINE_NAME = "timeline.jsonl"
UPDATE_S = 10.0  # longest time of one line within a phase, in seconds
Phase = Literal["starting", "steps", "validation", "saves"]
TIMES = ("steps", "validation", "saves", "starting", "redone", "between_starts")


def add_start(run_dir: str | Path, step: int) -> None:
    """Append the line of a new start of the run to timeline.jsonl. Call it under the run lock.

    `step` is that of the checkpoint from which the run resumes, or 0. Raises an OSError.
    """
    append_row(Path(run_dir) / TIMELINE_NAME, {"start": step, "time": round(time.time(), 3)})


class Timeline:
    """Records the phases of one start of a run in timeline.jsonl. The first phase is "starting".

    `step` is the number of optimizer steps done. The methods raise an OSError if they cannot write,
    and `end` an OSError or an UnreadableFileError if it cannot read.

    Args:
        folder: Run folder. If it is None, as on ranks other than 0, the methods do nothing.
    """

    def __init__(self, folder: Path | None):
        self._path = None if folder is None else folder / TIMELINE_NAME  # None: nothing is recorded
        self._phase: Phase = "starting"
        self._written_s = time.time()

    def enter(self, phase: Phase, step: int) -> None:
        """Record that the current phase ends and `phase` begins. Does nothing after `end`."""
        self._write({"phase": self._phase, "step": step})
        self._phase = phase

    @contextmanager
    def during(self, phase: Phase, step: int) -> Generator[None, None, None]:
        """Record the block as a phase, and then begin the phase before it again.

        A block that raises an error ends the training, so its phase stays the current one.
        """
        outer = self._phase
        self.enter(phase, step)
        yield
        self.enter(outer, step)

    def update(self, step: int) -> None:
        """Record that the current phase continues, at most every 10 seconds. Call it often."""
        if time.time() - self._written_s >= UPDATE_S:
            self.enter(self._phase, step)

    def end(self, step: int) -> dict[str, float]:
        """Record that the run has reached its own end, and return what `measure` returns.

        Later calls of any method do nothing. {} without a folder, or if lines have another form.
        """
        if self._path is None:
            return {}
        self.enter(self._phase, step)
        self._write({"end": step})
        rows, self._path = read_rows(self._path), None
        with suppress(LookupError, TypeError, OverflowError):  # a row that no run has written
            return measure(rows)
        return {}

    def _write(self, row: Row) -> None:
        """Append a row with the current time."""
        self._written_s = round(time.time(), 3)
        if self._path is not None:
            append_row(self._path, {**row, "time": self._written_s})


def measure(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the goodput of a run, from the rows of its timeline.jsonl.

    The keys are `goodput`, a fraction of the wall-clock time, and `<kind>_s` for each kind of time
    in TIMES, in seconds; see the top of this file. The dict is empty if no optimizer steps count.
    Raises a LookupError, TypeError or OverflowError for a row of another form.
    """
    seconds = dict.fromkeys(TIMES, 0.0)
    kept: list[tuple[int, float]] = []  # step and seconds of the intervals of steps that count
    last_s = None  # time of the last line, unless the run has reached its own end
    for row in rows:
        interval_s = 0.0 if last_s is None else max(0.0, row["time"] - last_s)
        if "start" in row:
            seconds["between_starts"] += interval_s
            seconds["redone"] += sum(s for step, s in kept if step > row["start"])
            kept = [(step, s) for step, s in kept if step <= row["start"]]
        elif row.get("phase") == "steps":
            kept.append((row["step"], interval_s))
        elif "phase" in row:
            seconds[row["phase"]] += interval_s
        last_s = None if "end" in row else row["time"]
    seconds["steps"] = sum(s for _, s in kept)
    if not seconds["steps"]:
        return {}
    times = {f"{name}_s": round(value, 3) for name, value in seconds.items()}
    return {"goodput": round(seconds["steps"] / sum(seconds.values()), 4), **times}


def describe(times: Mapping[str, float]) -> str:
    """Return a result of `measure`, not empty, as a phrase. Times below 0.05 s are left out."""
    shown = {name: times[f"{name}_s"] for name in TIMES}
    parts = [f"{s:.1f} s {name.replace('_', ' ')}" for name, s in shown.items() if s >= 0.05]
    return f"goodput {times['goodput']:.2f} ({', '.join(parts)})"

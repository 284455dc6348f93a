"""Time that a run needs to recover from a failure, computed from its timeline.jsonl."""

from collections.abc import Iterable, Mapping
from typing import Any


def recovery_times(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of each recovery of a run, in order of time.

    A recovery lasts from the last line of a start that did not reach the end of the run to the
    first step that no earlier start had done. It contains the time between the starts, the time of
    starting, and that of the steps done again. A recovery that did not end is left out. Within an
    interval of several steps, all steps are assumed to take the same time.

    Args:
        rows: Lines of timeline.jsonl of a trusted run.
    """
    recoveries = []
    last_s = None  # time of the last line, unless the run has reached its own end
    failed_s = None  # time of the last line before the start that has not recovered yet
    newest = 0  # newest step that any start has done
    step = 0  # step at the beginning of the interval
    for row in rows:
        if "start" in row:
            step = row["start"]
            failed_s = failed_s or last_s
        elif "phase" in row:
            if failed_s is not None and row["step"] > newest:
                fraction = (newest + 1 - step) / (row["step"] - step)
                new_step_s = row["begin"] + fraction * (row["time"] - row["begin"])
                recoveries.append(new_step_s - failed_s)
                failed_s = None
            step = max(step, row["step"])
            newest = max(newest, step)
        last_s = None if "end" in row else row["time"]
    return recoveries

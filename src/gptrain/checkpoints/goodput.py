"""Goodput: the part of a run's wall-clock time, over all of its starts, in which it has trained.

The watchdog of rank 0 counts the seconds of each phase (`Guard.phase_s`). Every manifest has them,
and a start that resumes from a checkpoint goes on counting. So a step that was done again counts
once. Kinds of time, in seconds:

    steps        optimizer steps that count, in the start whose result was kept
    validation   validations
    saves        training waits for a checkpoint or the mirror, and the end of the run
    starting     from the lock of the run folder, when the checkpoint to resume from is known, to
                 the end of the first micro-step: data, building, loading, compilation
    lost         from a save to the start that has resumed from it: steps whose result was lost,
                 the time in which nothing ran, and the first imports. If the run had reached its
                 own end after the save, this time is not counted

    goodput = steps / (sum of all five)
"""

import time
from collections.abc import Mapping
from pathlib import Path

from gptrain.checkpoints.manifest import read_manifest
from gptrain.checkpoints.status import read_status
from gptrain.core.errors import DONE

LOST = "lost"
# Phase of the watchdog -> kind of time. All other phases are "starting".
_KINDS = {"train": "steps", "validate": "validation", "save": "saves", "mirror": "saves"}
_KINDS |= {"end": "saves", LOST: LOST}
TIMES = ("steps", "validation", "saves", "starting", LOST)
ENTRIES = ("goodput", *(f"{kind}_s" for kind in TIMES))  # keys of `measure`


def earlier_seconds(run_dir: str, run_id: str, checkpoint: Path) -> dict[str, float]:
    """Return phase -> seconds of the earlier starts of a run that resumes from a checkpoint.

    Call it while status.json still shows how the last start ended. The result is empty for a
    checkpoint of another run.
    """
    saved = read_manifest(checkpoint)
    if saved.run_id != run_id:
        return {}
    was_done = (read_status(run_dir) or {}).get("exit_code") == DONE
    lost_s = 0.0 if was_done else max(0.0, time.time() - saved.saved_at)
    return saved.phase_s | {LOST: saved.phase_s.get(LOST, 0.0) + lost_s}


def measure(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the goodput of a run, from the seconds of its phases.

    The keys are `goodput`, a fraction of the wall-clock time, and `<kind>_s` for each kind of time
    in TIMES, in seconds; see the top of this file. The dict is empty if no optimizer steps count.
    """
    times = dict.fromkeys(TIMES, 0.0)
    for phase, value in seconds.items():
        times[_KINDS.get(phase, "starting")] += value
    if not times["steps"]:
        return {}
    goodput = round(times["steps"] / sum(times.values()), 4)
    return {"goodput": goodput} | {f"{kind}_s": round(value, 3) for kind, value in times.items()}


def describe(times: Mapping[str, float]) -> str:
    """Return a result of `measure`, not empty, as a phrase. Times below 0.05 s are left out."""
    shown = {kind: times[f"{kind}_s"] for kind in TIMES}
    parts = [f"{s:.1f} s {kind}" for kind, s in shown.items() if s >= 0.05]
    return f"goodput {times['goodput']:.2f} ({', '.join(parts)})"

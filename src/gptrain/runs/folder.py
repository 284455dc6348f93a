"""Reads what a run was and how it ended from its folder.

The folder may come from anybody: its small files are parsed, and nothing in them is executed.
"""

import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptrain.checkpoints.files import read_rows
from gptrain.checkpoints.lock import is_held
from gptrain.checkpoints.status import CHECKPOINTS_NAME, RESULT_NAME, read_status
from gptrain.checkpoints.store import CheckpointStore, DamagedCheckpointError, read_manifest
from gptrain.checkpoints.timeline import TIMELINE_NAME, measure
from gptrain.core.errors import DONE, ConfigIssue
from gptrain.core.small_files import read_json, read_yaml

# Errors that a file of another form than gptrain's may cause while it is read.
MALFORMED_FILE_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError)
OVERRIDES, CONFIG = ".hydra/overrides.yaml", ".hydra/config.yaml"


@dataclass(frozen=True)
class RunRecord:
    """One run, as its folder describes it.

    Attributes:
        path: Folder of the run.
        overrides: Overrides as they were typed.
        metrics: Final metrics, or those of the newest checkpoint if the run is not done. Values
            that are not finite are left out.
        steps: Number of optimizer steps, or None if it is not known.
        seconds: Time that the run took, in seconds, or None if it is not done.
        is_done: True if the run reached its own end.
        ended: Reason of the end in a word or two, such as "done", "running" or "lost".
        detail: Explanation of the reason. May be empty.
        goodput: `goodput`, the fraction of the time of all starts that was spent in steps that
            count, and the seconds of each phase such as `steps_s`. Empty for a run without a
            timeline.
    """

    path: Path
    overrides: list[str]
    metrics: dict[str, float]
    steps: float | None
    seconds: float | None
    is_done: bool
    ended: str
    detail: str
    goodput: dict[str, float]


def read_runs(folders: Iterable[Path]) -> list[RunRecord]:
    """Return the runs at or below each folder, each once.

    A run that cannot be read is left out, and a warning is printed on stderr.

    Args:
        folders: Run folders, or folders that contain run folders at any depth. A folder that does
            not exist has no runs.
    """
    runs = []
    files = (file for folder in folders for file in sorted(folder.rglob(OVERRIDES)))
    for path in dict.fromkeys(file.parents[1] for file in files):
        try:
            runs.append(read_run(path))
        except MALFORMED_FILE_ERRORS as error:
            message = f"{path}: {error or type(error).__name__}"
            print(ConfigIssue("", None, message, code=DONE).line, file=sys.stderr)
    return runs


def read_run(folder: Path) -> RunRecord:
    """Return the record of the run in a folder.

    Args:
        folder: Run folder.

    Raises:
        OSError, ValueError, TypeError, LookupError, AttributeError or OverflowError: If a file is
            missing, cannot be read, or has another form than gptrain's.
    """
    overrides = [str(word) for word in read_yaml(folder / OVERRIDES)]
    result = read_json(folder / RESULT_NAME) if (folder / RESULT_NAME).exists() else {}
    status, is_running = read_status(folder) or {}, is_held(folder)
    is_done = bool(status or result) and status.get("exit_code", DONE) == DONE and not is_running
    if is_done:
        facts, ending = result, result.get("ended", {})
        ended, detail = ending.get("reason", "done"), ending.get("detail", "")
    else:
        facts = _newest_checkpoint(folder) or {"steps": status.get("step")}
        ended = "running" if is_running else status.get("cause", "lost")
        detail = str(status.get("message", "")).removeprefix("error: ")
    metrics = {k: v for k, v in facts.get("metrics", {}).items() if _number(v) is not None}
    steps, seconds = _number(facts.get("steps")), _number(facts.get("seconds"))
    goodput = measure(read_rows(folder / TIMELINE_NAME))
    return RunRecord(
        folder, overrides, metrics, steps, seconds, is_done, str(ended), str(detail), goodput
    )


def _newest_checkpoint(folder: Path) -> dict[str, Any]:
    """Return `steps` and `metrics` of the newest checkpoint, or {} if there is none intact.

    `metrics` has the entry None under the name `step`, in place of a metric of this name.
    """
    if path := CheckpointStore(folder / CHECKPOINTS_NAME).newest():
        with suppress(DamagedCheckpointError):
            manifest = read_manifest(path)
            return {"steps": manifest["step"], "metrics": manifest["metrics"] | {"step": None}}
    return {}


def _number(value: Any) -> float | None:
    """Return the value if it is a finite number, else None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None

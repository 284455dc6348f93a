"""What a run folder says of its run, whoever wrote it: small files are read, nothing executed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptrain.problems import DONE
from gptrain.resilience.lock import is_held
from gptrain.resilience.manifest import DamagedCheckpoint, read_manifest
from gptrain.resilience.status import CHECKPOINTS_NAME, RESULT_NAME, read_status
from gptrain.small_files import UnreadableFile, read_json, read_yaml

OVERRIDES, CONFIG = ".hydra/overrides.yaml", ".hydra/config.yaml"


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        overrides: as typed.
        metrics: final ones; of a run that is not done those of its newest checkpoint.
        ended, detail: why it ended, in a word or two, and more of it.
        started_s: of its last start, since the epoch.   result: all of result.json.
    """

    path: Path
    overrides: list[str]
    metrics: dict[str, float]
    steps: float | None
    seconds: float | None
    ended: str
    detail: str
    started_s: float
    result: dict[str, Any]

    @property
    def typed(self) -> dict[str, str]:
        """Key -> value of the overrides."""
        return {
            key.lstrip("+"): value for key, _, value in (o.partition("=") for o in self.overrides)
        }


def find_runs(folder: Path) -> list[Path]:
    """The run folders at or below a folder, in order."""
    found = [path.parent for path in folder.rglob(".hydra")]
    return sorted(found, key=lambda path: [(len(part), part) for part in path.parts])


def read_run(folder: Path) -> RunRecord:
    """The run of a folder. Raises: UnreadableFile, OSError."""
    overrides = _whole(folder / OVERRIDES, list, read_yaml(folder / OVERRIDES))
    path = folder / RESULT_NAME
    result = _whole(path, dict, read_json(path) if path.exists() else {})
    status, runs = read_status(folder) or {}, is_held(folder)
    if (status or result) and status.get("exit_code", DONE) == DONE and not runs:
        why = result.get("ended")
        why, facts = why if isinstance(why, dict) else {}, result
        ended, detail = why.get("reason", "done"), why.get("detail", "")
    else:
        facts = {"steps": status.get("step")} | _newest_checkpoint(folder)
        ended = "running" if runs else status.get("cause", "lost")
        detail = status.get("message", "")
    metrics = facts.get("metrics")
    items = metrics.items() if isinstance(metrics, dict) else ()
    return RunRecord(
        path=folder,
        overrides=[str(one) for one in overrides],
        metrics={str(name): value for name, value in items if _number(value) is not None},
        steps=_number(facts.get("steps")),
        seconds=_number(facts.get("seconds")),
        ended=str(ended),
        detail=str(detail).removeprefix("error: "),
        started_s=(folder / OVERRIDES).stat().st_mtime,
        result=result,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The composed config, dotted key -> value. Raises: UnreadableFile, OSError."""
    return flatten(read_yaml(folder / CONFIG)) if (folder / CONFIG).exists() else {}


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, of nested dicts; an empty one is a value."""
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    inner = (flatten(value, f"{prefix}.{key}".lstrip(".")) for key, value in values.items())
    return {key: value for one in inner for key, value in one.items()}


def _newest_checkpoint(folder: Path) -> dict[str, Any]:
    """Steps and metrics of the newest checkpoint whose manifest is whole."""
    for path in sorted((folder / CHECKPOINTS_NAME).glob("step-*"), reverse=True):
        try:
            manifest = read_manifest(path)
        except DamagedCheckpoint:
            continue
        metrics = {name: value for name, value in manifest["metrics"].items() if name != "step"}
        return {"steps": manifest["step"], "metrics": metrics}
    return {}


def _whole(path: Path, kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise UnreadableFile(path, f"not a {kind.__name__}")
    return value


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and math.isfinite(value) else None

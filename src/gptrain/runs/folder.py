"""What a run folder says of its run, whoever wrote it: small files are read, nothing executed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gptrain.checkpoints.lock import is_held
from gptrain.checkpoints.manifest import DamagedCheckpointError, read_manifest
from gptrain.checkpoints.status import CHECKPOINTS_NAME, RESULT_NAME, read_status
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core.errors import DONE, ConfigIssue
from gptrain.core.small_files import flatten, read_facts, read_json, read_yaml

# Of files that are not as ours are, whoever wrote them.
WRONG = (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError)
OVERRIDES, CONFIG = ".hydra/overrides.yaml", ".hydra/config.yaml"


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        overrides: as typed.
        metrics: final ones; of a run that is not done those of its newest checkpoint.
        is_done: whether it came to an end of its own.
        ended, detail: why it ended, in a word or two, and more of it.
    """

    path: Path
    overrides: list[str]
    metrics: dict[str, float]
    steps: float | None
    seconds: float | None
    is_done: bool
    ended: str
    detail: str

    @property
    def typed(self) -> dict[str, str]:
        """Key -> value of the overrides."""
        pairs = (override.partition("=") for override in self.overrides)
        return {key.lstrip("+"): value for key, _, value in pairs}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The composed config, dotted key -> value."""
        return flatten(read_facts(self.path / CONFIG, read_yaml))

    @property
    def result(self) -> dict[str, Any]:
        """All of result.json, dotted key -> value."""
        return flatten(read_facts(self.path / RESULT_NAME))


def read_runs(folders: Iterable[Path]) -> list[RunRecord]:
    """The runs at or below each folder, once; one that cannot be read is a warning."""
    runs = []
    found = (file.parents[1] for folder in folders for file in sorted(folder.rglob(OVERRIDES)))
    for path in dict.fromkeys(found):
        try:
            runs.append(read_run(path))
        except WRONG as error:
            message = f"{path}: {error or type(error).__name__}"
            print(ConfigIssue("", None, message, code=DONE).line, file=sys.stderr)
    return runs


def read_run(folder: Path) -> RunRecord:
    """The run of a folder. Raises: one of WRONG."""
    overrides, path = read_yaml(folder / OVERRIDES), folder / RESULT_NAME
    result = read_json(path) if path.exists() else {}
    status, is_running = read_status(folder) or {}, is_held(folder)
    is_done = bool(status or result) and status.get("exit_code", DONE) == DONE and not is_running
    if is_done:
        facts, why = result, result.get("ended", {})
        ended, detail = why.get("reason", "done"), why.get("detail", "")
    else:
        facts = _newest_checkpoint(folder) or {"steps": status.get("step")}
        ended = "running" if is_running else status.get("cause", "lost")
        detail = status.get("message", "")
    metrics = facts.get("metrics", {}).items()
    return RunRecord(
        path=folder,
        overrides=[str(one) for one in overrides],
        metrics={name: value for name, value in metrics if _number(value) is not None},
        steps=_number(facts.get("steps")),
        seconds=_number(facts.get("seconds")),
        is_done=is_done,
        ended=str(ended),
        detail=str(detail).removeprefix("error: "),
    )


def _newest_checkpoint(folder: Path) -> dict[str, Any]:
    """Steps and metrics of the newest checkpoint, by its manifest."""
    if path := CheckpointStore(folder / CHECKPOINTS_NAME).newest():
        with suppress(DamagedCheckpointError):
            manifest = read_manifest(path)
            return {"steps": manifest["step"], "metrics": manifest["metrics"] | {"step": None}}
    return {}


def _number(value: Any) -> float | None:
    """A finite figure, else None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None

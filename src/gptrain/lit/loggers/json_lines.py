"""The logger of every run, which writes all logged metrics into metrics.jsonl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gptrain.checkpoints.json_lines import JsonLines, read_json_lines


class JsonLinesLogger(Logger):
    """Logger that writes `save_dir`/metrics.jsonl with one object per logged step.

    An object has the key `step` and the logged names. A value that is not finite is null.

    Args:
        save_dir: Folder of metrics.jsonl. The folder must exist.
    """

    name, version = "", ""

    def __init__(self, save_dir: str):
        super().__init__()
        self._path = Path(save_dir) / "metrics.jsonl"
        self._file: JsonLines | None = None  # opened by the first write, on rank 0 only
        self._last_row: dict[str, Any] = {}  # a later call for the same step adds values to it

    @property
    def save_dir(self) -> str:
        """Folder of metrics.jsonl."""
        return str(self._path.parent)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: .hydra/config.yaml in the run folder holds the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the object of a step.

        Metrics of a step before the last object are added to the last object, because some
        Lightning callbacks number the steps from 0 during a validation.

        Args:
            metrics: Name -> value.
            step: Number of optimizer steps done. None means 0.
        """
        if self._file is None:
            self._open()
        file = self._file
        assert file is not None
        last_step = self._last_row.get("step", -1)
        row = {"step": max(int(step or 0), last_step)}
        row |= {name: float(value) for name, value in metrics.items() if name != "step"}
        if row["step"] == last_step:
            self._last_row |= row
            file.replace_last(self._last_row)
        else:
            self._last_row = row
            file.append(row)

    def log_saved_step(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the object of a step before the step is saved, if the step has no object yet.

        Args:
            metrics: Name -> value.
            step: Number of optimizer steps done.
        """
        if self._last_row.get("step") != step:
            self.log_metrics(metrics, step)

    @rank_zero_only
    def discard_after(self, step: int) -> None:
        """Remove the objects of later steps.

        Args:
            step: Number of optimizer steps after which training starts or resumes.
        """
        if self._path.exists():
            self._open(step)

    def _open(self, last_step: float = float("inf")) -> None:
        rows = read_json_lines(self._path)
        rows = [
            row for row in rows if isinstance(row.get("step"), int) and row["step"] <= last_step
        ]
        self._file = JsonLines(self._path, rows)
        self._last_row = rows[-1] if rows else {}

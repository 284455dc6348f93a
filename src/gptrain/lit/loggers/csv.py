"""The logger that writes all logged metrics into one table, metrics.csv."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gptrain.checkpoints import fileops
from gptrain.core.small_files import open_regular


class CSVLogger(Logger):
    """Logger that writes `save_dir`/metrics.csv with one row per optimizer step.

    Each call writes to the file immediately. Lightning's CSVLogger writes one row per call and
    starts an empty file in every process, so it would lose the rows of a run that is resumed.

    Args:
        save_dir: Folder of metrics.csv. The folder must exist.
    """

    name, version = "", ""

    def __init__(self, save_dir: str):
        super().__init__()
        self._path = Path(save_dir) / "metrics.csv"
        self._columns: list[str] = []
        self._last_row: dict[str, Any] = {}  # a later call for the same step adds columns to it
        self._last_row_bytes = 0  # offset of the last row in the file

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: .hydra/config.yaml in the run folder holds the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the row of a step, and a column for each name that is new.

        Metrics of a step before the last row are added to the last row, because some Lightning
        callbacks number the steps from 0 during a validation.

        Args:
            metrics: Name -> value.
            step: Number of optimizer steps done. None means 0.
        """
        if not self._columns:
            self._write(*self._read())
        row = {name: float(value) for name, value in metrics.items()}
        row["step"] = max(int(step or 0), self._last_row.get("step", 0))
        if row["step"] == self._last_row.get("step"):
            row = self._last_row | row
            os.truncate(self._path, self._last_row_bytes)
        if row.keys() - set(self._columns):
            columns, rows = self._read()
            self._write([*dict.fromkeys((*columns, *row))], rows)
        with self._path.open("a", newline="") as file:
            self._last_row = row
            self._last_row_bytes = file.tell()
            csv.DictWriter(file, self._columns).writerow(row)

    def log_saved_step(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the row of a step before the step is saved, if the step has no row yet.

        Args:
            metrics: Name -> value.
            step: Number of optimizer steps done.
        """
        if self._last_row.get("step") != step:
            self.log_metrics(metrics, step)

    @rank_zero_only
    def discard_after(self, step: int) -> None:
        """Remove the rows of later steps, and a last row that was written only in part.

        Args:
            step: Number of optimizer steps after which training starts or resumes.
        """
        if self._path.exists():
            columns, rows = self._read()
            self._write(columns, [row for row in rows if row["step"] <= step])

    def _read(self) -> tuple[list[str], list[dict[str, Any]]]:
        if not self._path.exists():
            return ["step"], []
        with io.TextIOWrapper(open_regular(self._path), newline="") as file:
            reader = csv.DictReader(file)
            rows = [
                {name: cell for name, cell in row.items() if cell} | {"step": int(row["step"])}
                for row in reader
                if None not in row.values()  # skip a row that a killed process left incomplete
            ]
            return list(reader.fieldnames or ["step"]), rows

    def _write(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue().encode()
        fileops.replace(self._path, content)
        self._columns = columns
        self._last_row = rows[-1] if rows else {}
        self._last_row_bytes = content.rfind(b"\n", 0, -1) + 1

"""One table of all that is logged."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gptrain.lit.loggers.survive_trouble import survives_trouble
from gptrain.resilience import fileops


class CSVLogger(Logger):
    """metrics.csv in `save_dir` itself, a row per step, written at once.

    Lightning's own begins such a file anew whenever a process starts.
    """

    broken = False
    name, version = "", ""

    def __init__(self, save_dir: str):
        super().__init__()
        self._path = Path(save_dir) / "metrics.csv"
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}  # the row that a later call of the same step completes
        self._last_start = 0  # its place in the file, bytes

    @property
    def save_dir(self) -> str:
        """The folder of metrics.csv."""
        return str(self._path.parent)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing: they are in .hydra/config.yaml, and in no table of steps."""

    @survives_trouble
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds to the row of this step, or a row; a name that is new adds a column.

        What comes with an earlier step belongs to the last row: some of Lightning's monitors call
        the step whose validation is running by its index, counted from 0.
        """
        if not metrics:
            return
        if not self._columns and self._path.exists():
            self._write(*self._read())
        step = max(int(step or 0), int(self._last.get("step") or 0))
        row = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        if str(self._last.get("step")) == str(step):
            row = {**self._last, **row}
            with self._path.open("r+b") as file:
                file.truncate(self._last_start)
        added = [name for name in row if name not in self._columns]
        if added:
            rows = self._read()[1] if self._path.exists() else []
            self._write(self._columns + added, rows)
        with self._path.open("a", newline="") as file:
            self._last, self._last_start = row, file.tell()
            csv.DictWriter(file, self._columns).writerow(row)

    @survives_trouble
    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Removes the rows after step, and one that was cut short."""
        if self._path.exists():
            columns, rows = self._read()
            self._write(columns, [row for row in rows if int(row["step"]) <= step])

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        with self._path.open(newline="") as file:
            reader = csv.DictReader(file)
            # Where the process was killed within a row its last cells are missing.
            rows = [row for row in reader if None not in row.values()]
            return list(reader.fieldnames or []), rows

    def _write(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows[:-1])
        start = len(text.getvalue().encode())
        writer.writerows(rows[-1:])
        fileops.replace(self._path, text.getvalue().encode())
        self._columns, self._last, self._last_start = columns, {}, start
        if rows:
            self._last = {name: value for name, value in rows[-1].items() if value != ""}

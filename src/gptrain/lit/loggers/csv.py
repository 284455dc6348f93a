"""One table of all that is logged."""

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
    """metrics.csv in `save_dir` itself, a row per step, written at once.

    Lightning's own has a row per call, and begins its file anew whenever a process starts.
    """

    name, version = "", ""

    def __init__(self, save_dir: str):
        super().__init__()
        self._path = Path(save_dir) / "metrics.csv"
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}  # the row that a later call of the same step completes
        self._last_start = 0  # its place in the file, bytes

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing: they are in .hydra/config.yaml, and in no table of steps."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds to the row of this step, or a row; a name that is new adds a column.

        What comes with an earlier step belongs to the last row: some of Lightning's monitors call
        the step whose validation is running by its index, counted from 0.
        """
        if not self._columns:
            self._write(*self._read())
        row = {name: float(value) for name, value in metrics.items()}
        row["step"] = max(int(step or 0), self._last.get("step", 0))
        if row["step"] == self._last.get("step"):
            row = self._last | row
            os.truncate(self._path, self._last_start)
        if row.keys() - set(self._columns):
            columns, rows = self._read()
            self._write([*dict.fromkeys((*columns, *row))], rows)
        with self._path.open("a", newline="") as file:
            self._last, self._last_start = row, file.tell()
            csv.DictWriter(file, self._columns).writerow(row)

    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Removes the rows after step, and one that was cut short."""
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
                if None not in row.values()  # killed within a row: its last cells are missing
            ]
            return list(reader.fieldnames or ["step"]), rows

    def _write(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue().encode()
        fileops.replace(self._path, content)
        self._columns, self._last_start = columns, content.rfind(b"\n", 0, -1) + 1
        self._last = rows[-1] if rows else {}

"""Base class of the loggers that write a file with one row per optimizer step."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gptrain.checkpoints.json_lines import LineFile, Row


class RowLogger(Logger):
    """Base class of loggers that write a file with one row per step, and continue it on a resume.

    Lightning passes the values of a step in several calls, for example one for the step and one for
    its validation. All values of a step go into one row. A subclass defines `file_name`, `read` and
    `create`.

    Args:
        save_dir: Folder of the file. The folder must exist.

    Attributes:
        file_name: Name of the file.
        read: Function path -> complete rows of the file, empty if the file does not exist.
        create: Class of the file.
    """

    name, version = "", ""
    file_name: ClassVar[str]
    read: ClassVar[Callable[[Path], list[Row]]]
    create: ClassVar[type[LineFile]]

    def __init__(self, save_dir: str):
        super().__init__()
        self.path = Path(save_dir) / self.file_name
        self._file: LineFile | None = None  # opened by the first write, on rank 0 only
        self._last_row: Row = {}

    @property
    def save_dir(self) -> str:
        """Folder of the file."""
        return str(self.path.parent)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: .hydra/config.yaml in the run folder holds the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write metrics into the row of a step, on rank 0 only.

        Values that the row has already are replaced. Metrics of a step before the last row are
        added to the last row, because some Lightning callbacks number the steps from 0 during a
        validation. The first call opens the file, and keeps the rows that it has.

        Args:
            metrics: Name -> value.
            step: Number of optimizer steps done. None means 0.

        Raises:
            OSError: If the file cannot be written.
            UnreadableFileError: If the file is not a regular file.
        """
        file = self._file or self._open()
        last_step = self._last_row.get("step", -1)
        row = {"step": max(int(step or 0), last_step)}
        row |= {name: float(value) for name, value in metrics.items() if name != "step"}
        if row["step"] == last_step:
            self._last_row |= row
            file.replace_last(self._last_row)
        else:
            self._last_row = row
            file.append(row)

    @rank_zero_only
    def discard_after(self, step: int) -> None:
        """Remove the rows of later steps, and a last row that was written only in part, on rank 0.

        Does nothing if the file does not exist.

        Args:
            step: Number of optimizer steps after which training starts or resumes.

        Raises:
            OSError: If the file cannot be written.
            UnreadableFileError: If the file is not a regular file.
        """
        if self.path.exists():
            self._open(step)

    def _open(self, last_step: float = float("inf")) -> LineFile:
        """Open the file for writing, remove its rows of steps after `last_step`, and return it.

        A file is created if there is none. Rows without an integer `step` are removed, too.

        Args:
            last_step: Step of the last row that is kept.

        Raises:
            OSError: If the file cannot be written.
            UnreadableFileError: If the file is not a regular file.
        """
        rows = [row for row in self.read(self.path) if isinstance(row.get("step"), int)]
        rows = [row for row in rows if row["step"] <= last_step]
        self._last_row = rows[-1] if rows else {}
        self._file = self.create(self.path, rows)
        return self._file

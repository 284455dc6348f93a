"""The logger that writes all logged metrics into one table, metrics.csv."""

import csv
import io
import os
from pathlib import Path

from gptrain.checkpoints import fileops
from gptrain.core.small_files import open_regular
from gptrain.lit.loggers.rows import Row, RowLogger


class CSVLogger(RowLogger):
    """Logger that writes `save_dir`/metrics.csv with one row per logged optimizer step.

    A resumed run continues the file. Lightning's CSVLogger would start an empty file in every
    process, and write several rows for the values of one step.

    Args:
        save_dir: Folder of metrics.csv. The folder must exist.
    """

    file_name = "metrics.csv"

    def read(self) -> list[Row]:
        """Return the complete rows of the file, or an empty list if the file does not exist.

        An empty cell is left out of its row.
        """
        return read_table(self.path)

    def create(self, rows: list[Row]) -> "Table":
        """Replace the file by a table with these rows, and return the table, open for more rows.

        Args:
            rows: Rows with which the table begins.
        """
        return Table(self.path, rows)


class Table:
    """CSV file that grows at its end and whose columns are the names in its rows, `step` first.

    Args:
        path: Path of the file. Its folder must exist. A file of this name is replaced.
        rows: Rows with which the table begins.
    """

    def __init__(self, path: Path, rows: list[Row]):
        self.path = path
        self._write(rows)

    def append(self, row: Row) -> None:
        """Add a row at the end of the file.

        If the row has a name without a column, the whole file is written again with a column for
        it.

        Args:
            row: Name -> value. A column whose name is not in the row gets an empty cell.
        """
        if row.keys() - set(self._columns):
            self._write([*read_table(self.path), row])
            return
        with self.path.open("a", newline="") as file:
            self._last_row_bytes = file.tell()
            csv.DictWriter(file, self._columns).writerow(row)

    def replace_last(self, row: Row) -> None:
        """Replace the last row of the file, which must have a row.

        Args:
            row: Name -> value.
        """
        os.truncate(self.path, self._last_row_bytes)
        self.append(row)

    def _write(self, rows: list[Row]) -> None:
        """Replace the file by a table of rows, with a column for each name.

        Args:
            rows: Rows of the table.
        """
        names = [name for row in rows for name in row]
        self._columns = list(dict.fromkeys(["step", *names]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue().encode()
        fileops.replace(self.path, content)
        self._last_row_bytes = content.rfind(b"\n", 0, -1) + 1  # offset of the last row


def read_table(path: Path) -> list[Row]:
    """Return the rows of a CSV file of `Table`, or an empty list if the file does not exist.

    A row maps names to texts, except `step`, which is an int. A row that a killed process has
    written only in part is left out, and an empty cell is left out of its row.

    Args:
        path: Path of the file.

    Raises:
        UnreadableFileError: If the path is not a regular file.
    """
    if not path.exists():
        return []
    with io.TextIOWrapper(open_regular(path), newline="") as file:
        return [
            {name: cell for name, cell in row.items() if cell} | {"step": int(row["step"])}
            for row in csv.DictReader(file)
            if None not in row.values()
        ]

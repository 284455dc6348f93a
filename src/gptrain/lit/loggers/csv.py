"""The logger that writes all logged metrics into one table, metrics.csv."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from gptrain.checkpoints.json_lines import LineFile, Row
from gptrain.core.small_files import open_regular
from gptrain.lit.loggers.rows import RowLogger


class Table(LineFile):
    """CSV file that grows at its end and whose columns are the names in its rows, `step` first.

    If a row has a name without a column, the whole file is written again with a column for it.
    """

    def encode(self, row: Row) -> bytes:
        """Return the line of a row, with an empty cell for each column that the row lacks.

        Raises:
            ValueError: If the row has a name without a column.
        """
        line = io.StringIO()
        csv.DictWriter(line, self._columns).writerow(row)
        return line.getvalue().encode()

    def rewrite(self, rows: Sequence[Row]) -> None:
        """Replace the file by one with these rows, and with a column for each of their names.

        `step` is the first column, also if there are no rows.

        Raises:
            OSError: If the file cannot be written.
        """
        names = [name for row in rows for name in row]
        self._columns = list(dict.fromkeys(["step", *names]))
        header = {name: name for name in self._columns}
        super().rewrite([header, *rows])

    def append(self, row: Row) -> None:
        """Add a row as the last line of the file, and a column for each name that is new.

        With a new column the whole file is read and written again.

        Raises:
            OSError: If the file cannot be read or written.
        """
        if row.keys() <= set(self._columns):
            super().append(row)
        else:
            self.rewrite([*read_table(self.path), row])

    def replace_last(self, row: Row) -> None:
        """Replace the last row of the file, and add a column for each name that is new.

        The file must have a row. With a new column the whole file is read and written again.

        Raises:
            OSError: If the file cannot be read or written.
        """
        if row.keys() <= set(self._columns):
            super().replace_last(row)
        else:
            self.rewrite([*read_table(self.path)[:-1], row])


def read_table(path: Path) -> list[Row]:
    """Return the rows of a CSV file of `Table`, or an empty list if the file does not exist.

    A row maps names to texts, except `step`, which is an int. A row that a killed process has
    written only in part is left out, and an empty cell is left out of its row.

    Args:
        path: Path of the file.

    Raises:
        OSError: If the file cannot be read.
        UnreadableFileError: If the path is not a regular file.
        KeyError, ValueError: If a complete row has no `step` that is a whole number.
    """
    if not path.exists():
        return []
    with io.TextIOWrapper(open_regular(path), newline="") as file:
        return [
            {name: cell for name, cell in row.items() if cell} | {"step": int(row["step"])}
            for row in csv.DictReader(file)
            if None not in row.values()
        ]


class CSVLogger(RowLogger):
    """Logger that writes `save_dir`/metrics.csv with one row per logged optimizer step.

    A resumed run continues the file. Lightning's CSVLogger would start an empty file in every
    process, and write several rows for the values of one step.

    Args:
        save_dir: Folder of metrics.csv. The folder must exist.
    """

    file_name = "metrics.csv"
    read = staticmethod(read_table)
    create = Table

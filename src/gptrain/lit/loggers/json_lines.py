"""The logger of every run, which writes all logged metrics into metrics.jsonl."""

from gptrain.checkpoints.json_lines import JsonLines, read_json_lines
from gptrain.lit.loggers.rows import Row, RowLogger


class JsonLinesLogger(RowLogger):
    """Logger that writes `save_dir`/metrics.jsonl with one object per logged step.

    An object has the key `step` and the logged names. A value that is not finite is null.

    Args:
        save_dir: Folder of metrics.jsonl. The folder must exist.
    """

    file_name = "metrics.jsonl"

    def read(self) -> list[Row]:
        """Return the objects of the file with an integer `step`; an empty list without a file."""
        rows = read_json_lines(self.path)
        return [row for row in rows if isinstance(row.get("step"), int)]

    def create(self, rows: list[Row]) -> JsonLines:
        """Replace the file by one with these objects, and return it, open for more objects.

        Args:
            rows: Objects with which the file begins.
        """
        return JsonLines(self.path, rows)

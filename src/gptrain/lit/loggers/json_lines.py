"""The logger of every run, which writes all logged metrics into metrics.jsonl."""

from gptrain.checkpoints.json_lines import JsonLines, read_json_lines
from gptrain.lit.loggers.rows import RowLogger


class JsonLinesLogger(RowLogger):
    """Logger that writes `save_dir`/metrics.jsonl with one object per logged step.

    An object has the key `step` and the logged names. A value that is not finite is null.

    Args:
        save_dir: Folder of metrics.jsonl. The folder must exist.
    """

    file_name = "metrics.jsonl"
    read = staticmethod(read_json_lines)
    create = JsonLines

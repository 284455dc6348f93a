"""Files with one row per line, which grow while a run trains, such as JSON Lines."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptrain.checkpoints import fileops
from gptrain.checkpoints.status import finite_values
from gptrain.core.small_files import open_regular

Row = dict[str, Any]  # name -> value


class JsonLines:
    """File of JSON objects, one per line, which grows and whose last line can be replaced.

    NaN and infinity are written as null. Every write is passed to the operating system at once, so
    that a process that is killed loses no complete line. The constructor and the methods raise an
    OSError if that fails, and a TypeError if JSON has no form for a value.

    Args:
        path: Path of the file. Its folder must exist. A file or a link of this name is replaced.
        rows: Rows with which the file begins.
    """

    def __init__(self, path: Path, rows: Sequence[Row]):
        self.path = path
        lines = [encode(row) for row in rows]
        fileops.replace(path, b"".join(lines))
        self._last_line_bytes = sum(map(len, lines[:-1]))  # offset of the last line in the file

    def append(self, row: Row) -> None:
        """Add a row as the last line of the file."""
        with self.path.open("ab") as file:
            self._last_line_bytes = file.tell()
            file.write(encode(row))

    def replace_last(self, row: Row) -> None:
        """Replace the last line of the file by a row. The file must have a row."""
        with self.path.open("r+b") as file:
            file.seek(self._last_line_bytes)
            file.write(encode(row))
            file.truncate()


def encode(row: Row) -> bytes:
    """Return a row as one line of JSON."""
    return json.dumps(finite_values(row)).encode() + b"\n"


def append_row(path: Path, row: Row) -> None:
    """Append a row to a file of JSON objects, which is created if it does not exist.

    Raises:
        OSError: If the file cannot be written, or if it is a link.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "ab") as file:
        file.write(encode(row))


def read_json_lines(path: str | os.PathLike) -> list[Row]:
    """Return the objects of a file, or an empty list if the file does not exist or is a link.

    Links are not followed, because in an untrusted folder a link may point to any file of this
    user. A line that is not a JSON object is left out, such as one that was written only in part.

    Args:
        path: Path of the file.

    Raises:
        UnreadableFileError: If the path is not a regular file.
        OSError: If the file exists and cannot be read.
    """
    if os.path.islink(path):
        return []
    try:
        with open_regular(path) as file:
            rows = [_decode(line) for line in file]
    except FileNotFoundError:
        return []
    return [row for row in rows if isinstance(row, dict)]


def _decode(line: bytes) -> Any:
    """Return the value of a line of JSON, or None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # ValueError: also if the bytes are not UTF-8
        return None

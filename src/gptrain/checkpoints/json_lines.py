"""Files with one JSON object per line, which grow while a run trains."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptrain.checkpoints import fileops
from gptrain.checkpoints.status import finite_values
from gptrain.core.small_files import open_regular


class JsonLines:
    """Writes a file of JSON objects, whose last line can be replaced.

    Every write is passed to the operating system at once, so that a process that is killed loses no
    complete line. NaN and infinity are written as null.

    Args:
        path: Path of the file. Its folder must exist. A file or a link of this name is replaced.
        rows: Objects with which the file begins.
    """

    def __init__(self, path: Path, rows: Iterable[Mapping[str, Any]] = ()):
        self.path = path
        lines = [_encode(row) for row in rows]
        fileops.replace(path, b"".join(lines))
        self._last_line_bytes = sum(map(len, lines[:-1]))  # offset of the last line in the file

    def append(self, row: Mapping[str, Any]) -> None:
        """Add an object as the last line of the file."""
        with self.path.open("ab") as file:
            self._last_line_bytes = file.tell()
            file.write(_encode(row))

    def replace_last(self, row: Mapping[str, Any]) -> None:
        """Replace the last line of the file by an object. The file must have a line."""
        with self.path.open("r+b") as file:
            file.seek(self._last_line_bytes)
            file.write(_encode(row))
            file.truncate()


def read_json_lines(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the objects of a file, or an empty list if the file does not exist or is a link.

    The folder may be an untrusted one, whose link would copy a file from outside. A line that is
    not a JSON object is left out, such as a line that was written only in part.

    Args:
        path: Path of the file.

    Raises:
        UnreadableFileError: If the path is not a regular file.
    """
    if os.path.islink(path):
        return []
    try:
        with open_regular(path) as file:
            rows = [_decode(line) for line in file]
    except FileNotFoundError:
        return []
    return [row for row in rows if isinstance(row, dict)]


def _encode(row: Mapping[str, Any]) -> bytes:
    """Return an object as one line of JSON, in which NaN and infinity are null."""
    return json.dumps(finite_values(dict(row)), allow_nan=False).encode() + b"\n"


def _decode(line: bytes) -> Any:
    """Return the value of a line of JSON, or None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # ValueError: also if the bytes are not UTF-8
        return None

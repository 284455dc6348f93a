"""Files of a run that survive a power cut: a file then has its old or its new content.

By POSIX, a file's bytes are safe after fsync of the file, and its name after fsync of the folder
that holds the name. A rename within one folder is atomic.
"""

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptrain.core.small_files import open_regular

# Size of one write. Writing 540 MB took 0.3 s of processor time in pieces of 64 MiB and 2.0 s in
# pieces of 4 MiB (ext4, Linux 6).
_PIECE_BYTES = 1 << 26
Row = dict[str, Any]  # name -> value


class SaveFailedError(OSError):
    """Raised if a checkpoint cannot be written. Its files were removed, earlier ones are intact.

    Args:
        number: Number of the operating system's error (errno).
        folder: Folder of the checkpoints.
        rank: Rank whose file operation failed.
    """

    cause = "disk"

    def __init__(self, number: int, folder: str, rank: int = 0) -> None:
        super().__init__(number, folder)
        self.rank = rank

    def __str__(self) -> str:
        number, folder = self.args
        name = errno.errorcode.get(number, number)
        return (
            f"{folder}: cannot save: {os.strerror(number)} ({name}) on rank {self.rank}; earlier "
            "checkpoints are intact"
        )


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Create a file from pieces of its content, and wait until its bytes are on the disk.

    The name of the file is safe only after `sync_folder` of its folder.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    digest, n_bytes = hashlib.sha256(), 0
    try:
        for piece in pieces:
            left = memoryview(piece)
            n_bytes += left.nbytes
            while left:
                n_written = os.write(descriptor, left[:_PIECE_BYTES])
                digest.update(left[:n_written])
                left = left[n_written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)  # some file systems report a failed write only here
    return {"bytes": n_bytes, "sha256": digest.hexdigest()}


def replace(path: Path, data: bytes) -> None:
    """Replace the content of a file, which may be missing, and wait until it is on the disk.

    After an OSError the old content is unchanged. A link is replaced by a file; its target stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)  # a dead process with the same process number may have left it
    try:
        write_new_file(draft, [data])
        os.rename(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def to_json(value: object) -> bytes:
    """Return nested dicts and lists as indented JSON. NaN and infinity become null."""
    return json.dumps(_finite(value), indent=1, default=str).encode() + b"\n"


def _finite(value: object) -> object:
    """Return a value with None in place of every NaN and infinity, for JSON, which has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Files of rows, with one JSON object per line


def encode(row: Row) -> bytes:
    """Return a row as one line of JSON. NaN and infinity become null."""
    return json.dumps(_finite(row)).encode() + b"\n"


def append_row(path: Path, row: Row) -> None:
    """Append a row to a file, which is created if it does not exist and must not be a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "ab") as file:
        file.write(encode(row))


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, or an empty list if the file does not exist or is a link.

    Links are not followed, because in an untrusted folder a link may point to any file of this
    user. A line that is not a JSON object is left out, such as one that was written only in part.

    Raises:
        OSError: If the file cannot be read.
        UnreadableFileError: If the path is not a regular file.
    """
    if path.is_symlink() or not path.exists():
        return []
    rows = []
    with open_regular(path) as file:
        for line in file:
            with suppress(ValueError, RecursionError):  # also if the bytes are not UTF-8
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def append_or_replace(path: Path, row: Row, last: Row | None) -> None:
    """Append a row to an existing file, in place of its last row `last` unless that is None."""
    with path.open("r+b") as file:
        file.seek(-len(encode(last)) if last else 0, os.SEEK_END)
        file.write(encode(row))
        file.truncate()

"""Files of a run that survive a power cut: a file then has its old or its new content.

By POSIX, a file's bytes are safe after fsync of the file, and its name after fsync of the folder
that holds the name. A rename within one folder is atomic.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class SaveFailedError(OSError):
    """Raised if a checkpoint cannot be written. Its files were removed, earlier ones are intact.

    `number` is that of the operating system's error (errno; None becomes EIO), `folder` that of the
    checkpoints, and `rank` that of the failed file operation.
    """

    cause = "disk"

    def __init__(self, number: int | None, folder: str, rank: int = 0) -> None:
        super().__init__(number or errno.EIO, folder)
        self.rank = rank

    def __str__(self) -> str:
        reason = f"{os.strerror(self.args[0])} on rank {self.rank}"
        return f"{self.args[1]}: cannot save: {reason}; earlier checkpoints are intact"


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Create a file from pieces, wait until its bytes are on the disk, and return its FileEntry.

    The name of the file is safe only after `sync_folder` of its folder. Raises a FileExistsError if
    it exists, or another OSError, after which a part of the file may be left.
    """
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically, or create it, and wait until the new content is on the disk.

    The folder must exist. A link is replaced by a file; its target stays. After an OSError the file
    is unchanged, or, if only the sync of the folder failed, has the new content.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)  # a dead process with the same process number may have left it
    try:
        write_new_file(draft, [data])
        os.rename(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def to_json(value: object, indent: int | None = 1) -> bytes:
    """Return a value as JSON text with a line end, on one line if `indent` is None.

    NaN and infinity become null, and an object that JSON does not know becomes `str(object)`.
    """
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    return json.dumps(plain, indent=indent).encode() + b"\n"

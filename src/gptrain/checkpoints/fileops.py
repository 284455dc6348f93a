"""File operations that survive a power cut: a file then has its old or its new content.

By POSIX, a file's bytes are safe after fsync of the file, and its name after fsync of the folder
that holds the name. A rename within one folder is atomic.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

# Size of one write. Writing 540 MB took 0.3 s of processor time in pieces
# of 64 MiB and 2.0 s in pieces of 4 MiB (ext4, Linux 6).
_PIECE_BYTES = 1 << 26
Gather = Callable[[Any], list[Any]]  # collective function: one value of each rank, on all ranks


class SaveFailedError(OSError):
    """Raised if a checkpoint cannot be written, for example because the disk is full.

    Its files were removed, if there were any. Earlier checkpoints are intact.

    Args:
        number: Number of the operating system's error (errno).
        path: Folder of the checkpoints.
        needed: Expected size of the save in bytes.
        free: Free space of the file system, in bytes. None if unknown.
        rank: Rank whose file operation failed.
    """

    cause = "disk"

    def __init__(
        self, number: int, path: str | Path, needed: int, free: int | None, rank: int
    ) -> None:
        super().__init__(number, os.strerror(number), str(path))
        self.path = Path(path)
        self.needed = needed
        self.free = free
        self.rank = rank

    def __reduce__(self) -> tuple:
        return type(self), (self.errno, str(self.path), self.needed, self.free, self.rank)

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno, self.errno)
        return (
            f"{self.path}: cannot save: {self.strerror} ({name}) on rank {self.rank}; needs "
            f"{self.needed} bytes, {self.free} bytes free; earlier checkpoints are intact"
        )


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk (fsync of the folder).

    Args:
        folder: Existing folder, in which a file was made, renamed or removed.

    Raises:
        OSError: If the folder does not exist, or its names cannot be written.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new_file(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    progress: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Create a file from pieces of its content, and wait until its bytes are on the disk.

    The name of the file is safe only after `sync_folder` of its folder.

    Args:
        path: Path of the file.
        pieces: Content, in pieces that are made and freed one after another.
        progress: Function that is called after each write of at most 64 MiB, or None.

    Returns:
        The entry of the file in a manifest: `bytes` (size) and `sha256`.

    Raises:
        FileExistsError: If a file or a link of this name exists.
        OSError: If the file cannot be written. An incomplete file stays then.
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
                if progress:
                    progress()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)  # some file systems report a failed write only here
    return {"bytes": n_bytes, "sha256": digest.hexdigest()}


def replace(path: Path, data: bytes) -> None:
    """Replace the content of a file, which may be missing, and wait until it is on the disk.

    If the new content cannot be written, the old content is unchanged. A link is replaced by a
    file; its target stays.

    Args:
        path: Path of the file. Its folder must exist.
        data: New content.

    Raises:
        OSError: If the file cannot be written.
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


def remove_tree(path: Path) -> None:
    """Remove a folder and its content, or a file. Does nothing if the path does not exist.

    If the path is a link, only the link is removed.

    Args:
        path: Folder, file or link.

    Raises:
        OSError: If something cannot be removed. A part of the folder may be gone then.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def save_failed(error: OSError, folder: Path, needed_bytes: int, rank: int) -> SaveFailedError:
    """Return the error of a save for an error of the operating system.

    Args:
        error: Error of the operating system.
        folder: Folder of the checkpoints.
        needed_bytes: Expected size of the save.
        rank: Global rank of this process.
    """
    free = None
    with suppress(OSError):
        free = free_bytes(folder)
    return SaveFailedError(error.errno or errno.EIO, folder, needed_bytes, free, rank)


def free_bytes(folder: Path) -> int:
    """Return the free space of the file system that holds a folder, in bytes. Ignores quotas.

    Args:
        folder: Folder. If it does not exist, its parent must exist, and counts instead.

    Raises:
        OSError: If neither exists.
    """
    return shutil.disk_usage(folder if folder.exists() else folder.parent).free

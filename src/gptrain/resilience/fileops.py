"""Every file operation of a save, one function each: the seam at which faults are injected.

A save calls these as `fileops.write(...)`, never `os` itself, so that the fault campaign can count
the operations and break the k-th by putting other functions into this module. Nothing here reads
a setting: no configuration can reach the seam.

What a power cut leaves (POSIX): a file's bytes are safe after `sync`, its name after `sync_folder`
of the folder that holds it. `rename` is atomic in one folder, so it either happened or did not.
"""

import os
import shutil
from pathlib import Path

# In this order a save of one file calls them; the campaign wraps exactly these.
OPERATIONS = (
    "free_bytes",
    "make_folder",
    "create",
    "write",
    "sync",
    "close",
    "sync_folder",
    "rename",
    "remove",
    "remove_folder",
)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the folder's file system (quotas are not seen)."""
    return shutil.disk_usage(folder).free


def make_folder(folder: Path) -> None:
    """A folder that did not exist; its parent must."""
    os.mkdir(folder)


def create(path: Path) -> int:
    """Descriptor of a new, empty file; FileExistsError rather than anyone's bytes overwritten."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def write(descriptor: int, data: bytes | memoryview) -> int:
    """Number of bytes taken, which may be less than given."""
    return os.write(descriptor, data)


def sync(descriptor: int) -> None:
    """Wait until the file's bytes are on the medium."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Give the descriptor back; some file systems report a failed write only here."""
    os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in the folder are on the medium."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Atomic change of name within one file system; an existing target file is replaced."""
    os.rename(source, target)


def remove(path: Path) -> None:
    """Remove one file."""
    os.unlink(path)


def remove_folder(folder: Path) -> None:
    """Remove one empty folder."""
    os.rmdir(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder of plain files and folders, made of the operations above."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            remove(Path(entry.path))
    remove_folder(folder)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte, in as many turns as the file system needs."""
    left = memoryview(data)
    while left:
        left = left[write(descriptor, left) :]


def write_whole(path: Path, data: bytes) -> None:
    """A new file with these bytes, on the medium; its name is safe after `sync_folder`."""
    descriptor = create(path)
    try:
        write_all(descriptor, data)
        sync(descriptor)
    finally:
        close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """The file holds the old bytes or all of the new ones, whatever happens on the way."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)  # of a dead process that had our number
    try:
        write_whole(beside, data)
        rename(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)

"""CheckpointWriter: writes one rank's files of a save, and makes an error of a rank that of all.

torch.save writes from C++ code, and torch.distributed.checkpoint writes between collective
operations of all ranks. An exception of a full disk inside either ends in a crash, a hang or a
second error that hides the first. So both write to memory, which takes as long as a copy. Then a
thread of each rank writes the files to the disk. `CheckpointWriter.finish`, which the main threads
of all ranks call, raises the error of the lowest rank that failed as `SaveFailedError` on all
ranks.
"""

import errno
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gptrain.checkpoints import fileops
from gptrain.checkpoints.manifest import difference


class SaveFailedError(OSError):
    """Raised if a checkpoint cannot be written, for example because the disk is full.

    Its files were removed, if there were any. Earlier checkpoints are intact.

    Args:
        number: Number of the operating system's error (errno).
        path: Folder of the checkpoints.
        needed: Expected size of the save in bytes, or the size of the rank's files if that is more.
        free: Free space of the file system, in bytes. None if unknown.
        rank: Rank whose file operation failed.
    """

    cause = "disk"

    def __init__(
        self, number: int, path: str | Path, needed: int | None, free: int | None, rank: int
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
        remaining = "earlier checkpoints are intact"
        if not self.path.is_dir():
            remaining = "the folder has no checkpoint yet"
        return (
            f"{self.path}: cannot save: {self.strerror} ({name}) on rank {self.rank}; "
            f"needs {self.needed} bytes, {self.free} bytes free; {remaining}"
        )


@dataclass(eq=False)
class CheckpointWriter:
    """Writer of one rank's files into the folder of an unfinished checkpoint.

    Files are opened in memory (`open`), then written to the disk by a thread (`write`), and waited
    for (`finish`).

    Attributes:
        path: Hidden folder next to the target, into which all ranks write.
        rank: Global rank of this process.
        gather: Collective function that returns one picklable value of each rank on all ranks, in
            rank order. It is also used as a barrier.
        needed_bytes: Expected size of the save, for error messages. It grows to the size of this
            rank's files if they are larger.
        progress: Function that is called for every piece that is written or read back, or None.
    """

    path: Path
    rank: int
    gather: Callable[[object], list]
    needed_bytes: int
    progress: Callable[[], None] | None
    _opened: dict[str, io.BytesIO] = field(default_factory=dict, init=False)
    _written: list[Future[dict[str, dict]]] = field(default_factory=list, init=False)
    _thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def open(self, name: str) -> io.BytesIO:
        """Return a new file in memory, which a later `write` writes to the disk.

        Close the file when its content is complete.

        Args:
            name: Name of the file in the checkpoint.
        """
        file = _MemoryFile()
        self._opened[name] = file
        return file

    def write(self, in_background: bool) -> None:
        """Start a thread that writes the files that were opened since the last call to the disk.

        The files must be complete. More files may be opened and written before `finish` waits for
        the thread.

        Args:
            in_background: Whether training continues meanwhile. Then `progress` is not called,
                because heartbeats of the thread would hide a training that hangs.
        """
        if in_background:
            self.progress = None
        files = self._opened
        self._opened = {}
        self._written.append(self._thread.submit(self._write_files, files))

    def finish(self) -> list[dict[str, dict]]:
        """Wait until all ranks' files are on the disk, and return their entries for the manifest.

        All ranks must call this method.

        Returns:
            For each rank, in rank order: file name -> entry (`bytes` and `sha256`). All ranks get
            the same list.

        Raises:
            SaveFailedError: If a file operation failed on any rank. All ranks raise the same error.
        """
        with self.same_error_on_all_ranks():
            entries = {}
            for written in self._written:
                entries |= written.result()
        return self.gather(entries)

    @contextmanager
    def same_error_on_all_ranks(self) -> Generator[None, None, None]:
        """Raise the same SaveFailedError on all ranks, if any rank has failed to write its files.

        All ranks must enter the block, after which they gather their errors. An OSError of the file
        system within the block becomes a SaveFailedError; that of the lowest failed rank is raised.
        Other exceptions pass at once, without a collective operation: their rank is about to end
        the job. After any exception rank 0 removes the folder of the unfinished checkpoint.
        """
        local_failure = free = None
        try:
            try:
                yield
            except OSError as error:
                if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
                    raise  # an error of the network, not of the file system
                folder = self.path.parent
                with suppress(OSError):
                    free = free_bytes(folder)
                local_failure = SaveFailedError(
                    error.errno, folder, self.needed_bytes, free, self.rank
                )
                local_failure.__cause__ = error
            for failure in self.gather(local_failure):
                if failure is not None:
                    raise failure
        except BaseException:
            if self.rank == 0:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _write_files(self, files: dict[str, io.BytesIO]) -> dict[str, dict]:
        """Write files to the disk, free the memory of each, and return their manifest entries.

        Args:
            files: Files in memory by name. The dict is empty afterwards.

        Returns:
            The entry (`bytes` and `sha256`) of each file by its name.

        Raises:
            OSError: If a file cannot be written, or reads differently from what was written.
        """
        sizes = [file.getbuffer().nbytes for file in files.values()]
        self.needed_bytes = max(self.needed_bytes, sum(sizes))
        entries = {}
        while files:
            name, file = files.popitem()
            entries[name] = self._write_file(self.path / name, file.getbuffer())
        return entries

    def _write_file(self, path: Path, content: memoryview) -> dict:
        """Write a file, read it back to verify it, and return its entry for the manifest.

        Args:
            path: New file.
            content: Content of the file.

        Returns:
            The entries `bytes` (size) and `sha256`.

        Raises:
            OSError: If the file cannot be written, or reads differently from what was written.
        """
        entry = {"bytes": content.nbytes, "sha256": hashlib.sha256(content).hexdigest()}
        fileops.write_new_file(path, content, self._beat)
        reason = difference(path, entry, self._beat)
        if reason:
            raise OSError(errno.EIO, f"the file reads differently from what was written: {reason}")
        return entry

    def _beat(self, *_: int) -> None:
        """Call `progress`, if any, to show that this rank is alive. The arguments are ignored."""
        if self.progress:
            self.progress()


def free_bytes(folder: Path) -> int:
    """Return the free space of the file system that holds a folder, in bytes. Ignores quotas.

    Args:
        folder: Folder. If it does not exist, its parent must exist, and counts instead.

    Raises:
        OSError: If neither exists.
    """
    return shutil.disk_usage(folder if folder.exists() else folder.parent).free


class _MemoryFile(io.BytesIO):
    """File in memory that keeps its content when it is closed."""

    def close(self) -> None:
        """Do nothing: the content is written to the disk after torch has closed the file."""

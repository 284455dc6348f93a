"""One save: the files that a rank writes, and the one answer that all ranks give.

torch.save passes its bytes to C++ code and torch.distributed.checkpoint to collectives of all
ranks; an exception of a full disk raised inside either ends in a crash, a hang, or a second error
that hides the first. So they write to memory, which takes as long as a copy. Then the files go to
the disk, of a save in the background from a thread of each rank, and `Draft.finish` raises what
went wrong there, on all ranks, as `SaveFailed`. It is for the main threads, as collectives are.
"""

import errno
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptrain.resilience import fileops
from gptrain.resilience.manifest import difference, is_file_name

# 540 MB took 2.0 s of a processor in pieces of 4 MiB and 0.3 s in these (ext4, Linux 6).
_PIECE_BYTES = 1 << 26


class SaveFailed(OSError):
    """A checkpoint could not be written; nothing of it is left, the ones before are untouched.

    Attributes:
        needed, free: bytes of this save (of this rank) and on its file system, None if unknown.
        rank: whose file operation failed.
    """

    def __init__(
        self, number: int, path: str | Path, needed: int | None, free: int | None, rank: int
    ) -> None:
        super().__init__(number, os.strerror(number), str(path))
        self.path, self.needed, self.free, self.rank = Path(path), needed, free, rank

    def __reduce__(self) -> tuple:
        return type(self), (self.errno, str(self.path), self.needed, self.free, self.rank)

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno, self.errno)
        return (
            f"{self.path}: cannot save: {self.strerror} ({name}) on rank {self.rank}; "
            f"needs {self.needed} bytes, {self.free} bytes free; earlier checkpoints are intact"
        )


class NoSpace(OSError):
    """There is less room than a save needs; found out before anything was written."""

    def __init__(self, path: Path, needed: int, free: int) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.path, self.needed, self.free = path, needed, free

    def __str__(self) -> str:
        return f"{self.path}: saving needs {self.needed} bytes, {self.free} bytes are free"


class Draft:
    """The part of one rank in a save: its files in a checkpoint that is not yet one.

    Attributes:
        error: the first of this rank, None as long as all went well.

    Args:
        path: a hidden folder beside the target, into which all ranks write.
        gather: collects one picklable value of each rank on all ranks, in rank order; it is the
            barrier, too.
        needed_bytes: what to say of the size where nothing was written.
        progress: called for every piece that is written or read back.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        gather: Callable[[object], list],
        needed_bytes: int,
        progress: Callable[[], None] | None,
    ) -> None:
        self.path, self.rank, self.gather = path, rank, gather
        self.needed_bytes, self.progress = needed_bytes, progress
        self.error: BaseException | None = None
        self._held: dict[str, bytes] = {}
        self._entries: dict[str, dict] = {}  # of the files that are on the disk
        self._thread: threading.Thread | None = None

    def open(self, name: str) -> "HeldFile":
        """A new file of the checkpoint, for torch.save and the like; use it as a context."""
        if not is_file_name(name):
            raise ValueError(f"{name}: a checkpoint is one flat folder")
        return HeldFile(self._held, name)

    def write(self) -> None:
        """Puts the files on the disk, each freed as soon as it is there."""
        self.needed_bytes = max(self.needed_bytes, sum(map(len, self._held.values())))
        try:
            while self._held:
                name, content = self._held.popitem()
                self._entries[name] = self._write_file(self.path / name, content)
                del content
        except BaseException as error:  # raised by `finish`; here it might end a thread
            self.error = self.error or error

    def write_in_background(self) -> None:
        """Lets a thread do so, without progress: that would hide a training that hangs."""
        self.progress = None
        self._thread = threading.Thread(target=self.write, daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread still is."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> list[dict[str, dict]]:
        """The entries of every rank's files, once all are on the disk. Raises: SaveFailed."""
        if self._thread is not None:
            self._thread.join()
        with self.same_answer():
            if self.error is not None:
                raise self.error
        return self.gather(self._entries)

    @contextmanager
    def same_answer(self) -> Iterator[None]:
        """Lets all ranks raise the first rank's SaveFailed, so that none goes on or waits alone.

        Other exceptions pass: their rank is about to end the job, and a collective might not
        return.
        """
        mine, free = None, None
        try:
            yield
        except SaveFailed as error:
            mine = error
        except OSError as error:
            if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
                raise  # of the network, not of the file system
            with suppress(OSError):
                free = fileops.free_bytes(self.path.parent)
            mine = SaveFailed(error.errno, self.path.parent, self.needed_bytes, free, self.rank)
            mine.__cause__ = error
        for failure in self.gather(mine):
            if failure is not None:
                raise failure

    def _write_file(self, path: Path, content: bytes) -> dict:
        """Its entry in the manifest, after it was read back."""
        digest, whole = hashlib.sha256(), memoryview(content)
        descriptor = fileops.create(path)
        try:
            for start in range(0, len(whole), _PIECE_BYTES):
                piece = whole[start : start + _PIECE_BYTES]
                digest.update(piece)
                fileops.write_all(descriptor, piece)
                if self.progress:
                    self.progress()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)  # some file systems report a failed write only here
        entry = {"bytes": len(whole), "sha256": digest.hexdigest()}
        if found := difference(path, entry, self.progress):
            raise OSError(errno.EIO, f"what was written reads otherwise: {found}")
        return entry


class HeldFile(io.BytesIO):
    """A file in memory, given to the draft when it is closed."""

    def __init__(self, held: dict[str, bytes], name: str) -> None:
        super().__init__()
        self._held, self._name = held, name

    def close(self) -> None:
        """Gives its content away."""
        if not self.closed:
            self._held[self._name] = self.getvalue()  # no copy: the buffer is given away
            super().close()

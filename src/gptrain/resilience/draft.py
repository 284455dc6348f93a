"""One save: the files that a rank writes, and the one answer that all ranks give.

torch.save passes its bytes to C++ code and torch.distributed.checkpoint to collectives of all
ranks; an exception of a full disk raised inside either ends in a crash, a hang, or a second error
that hides the first. So a file here never raises. It keeps the first error and drops the rest of
its bytes (still counting them: so many were needed), and `Draft.finish` raises it afterwards, on
all ranks, as `SaveFailed`.

Of a save in the background the files are held in memory, which takes as long as a copy; a thread of
each rank writes them. `finish` is for the main threads, as collectives are.
"""

import errno
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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
        files: name -> {"bytes", "sha256"} of this rank's finished files.
        n_bytes: bytes offered so far, written or not.
        error: the first OSError of this rank, None as long as all went well.

    Args:
        path: a hidden folder beside the target, into which all ranks write.
        gather: collects one picklable value of each rank on all ranks, in rank order; it is the
            barrier, too.
        needed_bytes: what to say of the size where nothing was written.
        progress: called for every piece that is written or read back; not in the background, where
            it would hide that the training hangs.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        gather: Callable[[object], list],
        needed_bytes: int,
        progress: Callable[[], None] | None,
        in_background: bool,
    ) -> None:
        self.path, self.rank, self.gather = path, rank, gather
        self.needed_bytes, self.in_background = needed_bytes, in_background
        self.progress = None if in_background else progress
        self.files: dict[str, dict] = {}
        self.error: OSError | None = None
        self.n_bytes = 0
        self._held: dict[str, bytes] = {}
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None  # of the thread, other than a refused operation

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A new file of the checkpoint, for torch.save and the like."""
        if not is_file_name(name):
            raise ValueError(f"{name}: a checkpoint is one flat folder")
        if not self.in_background:
            with DraftFile(self, name) as file:
                yield file
            return
        with io.BytesIO() as memory:
            yield memory
            self._held[name] = memory.getvalue()  # no copy: the buffer is given away

    def start_writing(self) -> None:
        """Lets a thread write the files that are held."""
        self._thread = threading.Thread(target=self._write_held, daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread still is."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> list[dict[str, dict]]:
        """The entries of every rank's files, once all are on the disk. Raises: SaveFailed."""
        if self._thread is not None:
            self._thread.join()
        if self._crash is not None:
            raise self._crash
        with self.same_answer():
            if self.error is not None:
                raise self.error
        return self.gather(self.files)

    @contextmanager
    def same_answer(self) -> Iterator[None]:
        """Lets all ranks raise the first rank's SaveFailed, so that none goes on or waits alone.

        Other exceptions pass: their rank is about to end the job, and a collective might not
        return.
        """
        mine = None
        try:
            yield
        except SaveFailed as error:
            mine = error
        except OSError as error:
            if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
                raise  # of the network, not of the file system
            folder, needed = self.path.parent, max(self.needed_bytes, self.n_bytes)
            mine = SaveFailed(error.errno, folder, needed, _free_bytes(folder), self.rank)
            mine.__cause__ = error
        for failure in self.gather(mine):
            if failure is not None:
                raise failure

    def _write_held(self) -> None:
        try:
            while self._held:
                name, content = self._held.popitem()
                with DraftFile(self, name) as file:
                    file.write(content)
                del content  # freed as soon as it is on the disk
        except BaseException as crash:
            self._crash = crash


class DraftFile(io.RawIOBase):
    """A file that can be written once, front to back; `close` syncs it and reads it back."""

    def __init__(self, draft: Draft, name: str) -> None:
        super().__init__()
        self._draft, self._path = draft, draft.path / name
        self._digest = hashlib.sha256()
        self._n_bytes = 0
        self._pending = bytearray()
        self._descriptor: int | None = None
        with self._keep_error():
            self._descriptor = fileops.create(self._path)

    def write(self, data: bytes | memoryview) -> int:
        """Number of bytes given: all are taken."""
        view = memoryview(data).cast("B")
        self._n_bytes += len(view)
        self._draft.n_bytes += len(view)
        if len(self._pending) + len(view) < _PIECE_BYTES:
            self._pending += view
        else:
            self._put_pending()
            for start in range(0, len(view), _PIECE_BYTES):
                self._put(view[start : start + _PIECE_BYTES])
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._n_bytes

    def writable(self) -> bool:
        """True."""
        return True

    def close(self) -> None:
        """Writes what is pending, waits for the disk, reads it back, and adds it to the draft."""
        if self.closed:
            return
        self._put_pending()
        entry = {"bytes": self._n_bytes, "sha256": self._digest.hexdigest()}
        if self._descriptor is not None:
            with self._keep_error():
                os.fsync(self._descriptor)
            try:  # even after an error: the descriptor is ours to give back
                os.close(self._descriptor)
            except OSError as error:
                self._draft.error = self._draft.error or error
        with self._keep_error():
            if found := difference(self._path, entry, self._draft.progress):
                raise OSError(errno.EIO, f"what was written reads otherwise: {found}")
        self._draft.files[self._path.name] = entry
        super().close()

    def _put_pending(self) -> None:
        if self._pending:
            self._put(memoryview(self._pending))
            self._pending = bytearray()

    def _put(self, piece: memoryview) -> None:
        self._digest.update(piece)
        with self._keep_error():
            fileops.write_all(self._descriptor, piece)
        if self._draft.progress:
            self._draft.progress()

    @contextmanager
    def _keep_error(self) -> Iterator[None]:
        """Keeps the block's OSError in the draft."""
        try:
            yield
        except OSError as error:
            self._draft.error = self._draft.error or error


def _free_bytes(folder: Path) -> int | None:
    try:
        return fileops.free_bytes(folder)
    except OSError:
        return None

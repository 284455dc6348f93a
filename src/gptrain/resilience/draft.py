"""A checkpoint while it is written: files hashed as they go to disk, errors kept for one place.

torch.save hands its bytes to C++ code and torch.distributed.checkpoint to collectives of all ranks;
an exception of a full disk thrown into either ends in a crash, a hang, or a second error that hides
the first. So a file here never raises. It keeps the first error and swallows the rest of its bytes
(still counting them: that is how many were needed), and `Save` raises it afterwards, on all ranks,
as `SaveFailed`.
"""

import errno
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path

from gptrain.resilience import fileops
from gptrain.resilience.manifest import difference

# 540 MB took 2.0 s of a processor in pieces of 4 MiB and 0.3 s in these (ext4, Linux 6).
_PIECE_BYTES = 1 << 26


class SaveFailed(OSError):
    """A checkpoint could not be written; nothing of it is left, the ones before are untouched.

    Attributes:
        needed, free: bytes of this save (of this rank) and on its file system, None if unknown.
        rank: whose file operation failed.
    """

    def __init__(
        self,
        number: int,
        path: str | Path,
        needed: int | None = None,
        free: int | None = None,
        rank: int = 0,
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


class NoSpace(SaveFailed):
    """There is less room than a save needs; found out before anything was written."""

    def __init__(self, path: str | Path, needed: int, free: int) -> None:
        super().__init__(errno.ENOSPC, path, needed, free)

    def __reduce__(self) -> tuple:
        return type(self), (str(self.path), self.needed, self.free)


class Draft:
    """The files that one rank writes into a checkpoint that is not yet one.

    Attributes:
        path: the folder all ranks write into.
        files: name -> {"bytes", "sha256"} of this rank's finished files.
        n_bytes: bytes offered so far, written or not.
        error: the first OSError of this rank, None as long as all went well.

    Args:
        progress: called for every piece that is written or read back.
        held: files stay in memory until `write_held`, which another thread may call.
    """

    def __init__(
        self, path: Path, progress: Callable[[], None] | None = None, held: bool = False
    ) -> None:
        self.path = path
        self.progress = progress
        self.files: dict[str, dict] = {}
        self.error: OSError | None = None
        self.n_bytes = 0
        self._held: dict[str, bytes] | None = {} if held else None

    def open(self, name: str) -> "DraftFile | HeldFile":
        """A new file of the checkpoint, for torch.save and the like; use it as a context."""
        if os.path.basename(name) != name:
            raise ValueError(f"{name}: a checkpoint is one flat folder")
        return DraftFile(self, name) if self._held is None else HeldFile(self._held, name)

    def write_held(self) -> None:
        """Puts the held files on the medium, each freed as soon as it is there."""
        while self._held:
            name, content = self._held.popitem()
            with DraftFile(self, name) as file:
                file.write(content)
            del content


class HeldFile(io.BytesIO):
    """A file in memory, handed over when it is closed."""

    def __init__(self, held: dict[str, bytes], name: str) -> None:
        super().__init__()
        self._held, self._name = held, name

    def close(self) -> None:
        """Hand it over."""
        if not self.closed:
            self._held[self._name] = self.getvalue()  # no copy: the buffer is given away
            super().close()


class DraftFile(io.RawIOBase):
    """A file that can be written once, front to back; `close` puts it on the medium."""

    def __init__(self, draft: Draft, name: str) -> None:
        super().__init__()
        self._draft, self._name = draft, name
        self._digest = hashlib.sha256()
        self._n_bytes = 0
        self._pending = bytearray()
        self._descriptor: int | None = None
        self._guarded(self._create)

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
        """Write what is pending, wait for the medium, read it back, and tell the draft."""
        if self.closed:
            return
        self._put_pending()
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self._guarded(fileops.sync, descriptor)
            try:  # even after an error: the descriptor is ours to give back
                fileops.close(descriptor)
            except OSError as error:
                self._draft.error = self._draft.error or error
        entry = {"bytes": self._n_bytes, "sha256": self._digest.hexdigest()}
        self._guarded(self._read_back, entry)
        self._draft.files[self._name] = entry
        super().close()

    def _create(self) -> None:
        self._descriptor = fileops.create(self._draft.path / self._name)

    def _read_back(self, entry: dict) -> None:
        path = self._draft.path / self._name
        if found := difference(path, entry, self._draft.progress):
            raise OSError(errno.EIO, f"what was written reads otherwise: {found}")

    def _put_pending(self) -> None:
        if self._pending:
            self._put(memoryview(self._pending))
            self._pending = bytearray()

    def _put(self, piece: memoryview) -> None:
        self._digest.update(piece)
        self._guarded(fileops.write_all, self._descriptor, piece)
        if self._draft.progress:
            self._draft.progress()

    def _guarded(self, operation: Callable, *arguments: object) -> None:
        if self._draft.error is None:
            try:
                operation(*arguments)
            except OSError as error:
                self._draft.error = error

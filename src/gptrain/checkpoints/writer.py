"""One save: the files that a rank writes, and the one answer that all ranks give.

torch.save passes its bytes to C++ code and torch.distributed.checkpoint to collectives of all
ranks; an exception of a full disk raised inside either ends in a crash, a hang, or a second error
that hides the first. So they write to memory, which takes as long as a copy. Then the files go to
the disk from a thread of each rank, and `CheckpointWriter.finish` raises what went wrong there, on
all ranks,
as `SaveFailedError`. It is for the main threads, as collectives are.
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
    """A checkpoint cannot be written; nothing of it is left, the ones before are untouched.

    Attributes:
        needed, free: bytes of this save (of this rank) and on its file system, None if unknown.
        rank: whose file operation failed.
    """

    cause = "disk"

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
            f"needs {self.needed} bytes, {self.free} bytes free; "
            + ("earlier checkpoints are intact" if self.path.is_dir() else "none is there")
        )


@dataclass(eq=False)
class CheckpointWriter:
    """The part of one rank in a save: its files in a checkpoint that is not yet one.

    Attributes:
        path: a hidden folder beside the target, into which all ranks write.
        gather: collects one picklable value of each rank on all ranks, in rank order; it is the
            barrier, too.
        needed_bytes: what to say of the size where nothing was written.
        progress: called for every piece that is written or read back.
    """

    path: Path
    rank: int
    gather: Callable[[object], list]
    needed_bytes: int
    progress: Callable[[], None] | None
    _held: dict[str, io.BytesIO] = field(default_factory=dict, init=False)
    _written: list[Future[dict[str, dict]]] = field(default_factory=list, init=False)
    _thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def open(self, name: str) -> io.BytesIO:
        """A new file of the checkpoint, for torch.save and the like; use it as a context."""
        file = self._held[name] = _HeldFile()
        return file

    def write(self, in_background: bool) -> None:
        """Hand the files that were opened since the last call to the thread that writes them.

        `finish` waits for that thread. More files may be opened and handed over until then.
        """
        if in_background:
            self.progress = None  # it would hide a training that hangs
        files, self._held = self._held, {}
        self._written.append(self._thread.submit(self._write_files, files))

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread still is."""
        return not all(written.done() for written in self._written)

    def finish(self) -> list[dict[str, dict]]:
        """The entries of every rank's files, once all are on the disk. Raises: SaveFailedError."""
        with self.same_error_on_all_ranks():
            entries = {}
            for written in self._written:
                entries |= written.result()
        return self.gather(entries)

    @contextmanager
    def same_error_on_all_ranks(self) -> Generator[None, None, None]:
        """Lets all ranks raise the first rank's SaveFailedError, so that none goes on or waits
        alone.

        Other exceptions pass: their rank is about to end the job, and a collective might not
        return. After any exception nothing is left of the draft.
        """
        mine = free = None
        try:
            try:
                yield
            except OSError as error:
                if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
                    raise  # of the network, not of the file system
                folder = self.path.parent
                with suppress(OSError):
                    free = free_bytes(folder)
                mine = SaveFailedError(error.errno, folder, self.needed_bytes, free, self.rank)
                mine.__cause__ = error
            for failure in self.gather(mine):
                if failure is not None:
                    raise failure
        except BaseException:
            if self.rank == 0:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _write_files(self, files: dict[str, io.BytesIO]) -> dict[str, dict]:
        """Return the entries of these files, each of which is freed once it is on the disk."""
        sizes = [file.getbuffer().nbytes for file in files.values()]
        self.needed_bytes, entries = max(self.needed_bytes, sum(sizes)), {}
        while files:
            name, file = files.popitem()
            entries[name] = self._write_file(self.path / name, file.getbuffer())
        return entries

    def _write_file(self, path: Path, content: memoryview) -> dict:
        """Its entry in the manifest, after it was read back."""
        entry = {"bytes": content.nbytes, "sha256": hashlib.sha256(content).hexdigest()}
        fileops.write_new_file(path, content, self._beat)
        if found := difference(path, entry, self._beat):
            raise OSError(errno.EIO, f"what was written reads otherwise: {found}")
        return entry

    def _beat(self, *_: int) -> None:
        if self.progress:
            self.progress()


def free_bytes(folder: Path) -> int:
    """Left on the file system of a folder, which may still have to be made; quotas are not seen."""
    return shutil.disk_usage(folder if folder.exists() else folder.parent).free


class _HeldFile(io.BytesIO):
    def close(self) -> None:
        """Nothing: what torch has closed is still to be written to the disk."""

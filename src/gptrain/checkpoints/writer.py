"""Save: one rank's part of a save, in which an error of one rank is raised on all ranks."""

import errno
import io
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gptrain.checkpoints import fileops
from gptrain.checkpoints.manifest import REST_NAME
from gptrain.checkpoints.shards import Shard, Tensors, encode, plan_files

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


class Save:
    """One rank's part of a save: files in the folder of an unfinished checkpoint.

    All ranks make this object and call its methods together.

    Args:
        folder: Folder of the files. Rank 0 makes it, and its parent.
        tensors: MODEL or OPTIMIZER -> name -> tensor or shard of this rank.
        rest: Value for torch.save that rank 0 writes into one more file. Other ranks ignore it.
        rank: Global rank of this process.
        gather: Collective function that returns one value of each rank on all ranks.
        needed_bytes: Expected size of the save over all ranks, for error messages.
        in_background: Whether a thread writes copies of the tensors. Else `finish` writes them.
        progress: Function that is called while bytes are written, but not in the background, where
            the heartbeats would hide a training that hangs.

    Raises:
        SaveFailedError: On all ranks, if the folder cannot be made, or fewer than `needed_bytes`
            bytes are free.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Tensors],
        rest: Any,
        *,
        rank: int,
        gather: Gather,
        needed_bytes: int,
        in_background: bool,
        progress: Callable[[], object] | None,
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.gather = gather
        self.needed_bytes = needed_bytes
        self.progress = progress
        self.on_all_ranks(self._make_folder)
        self._files = plan_files(tensors, rank, gather)
        self._rest = io.BytesIO()
        if rank == 0:
            torch.save(rest, self._rest)
        self._written = None
        if in_background:
            self.progress = None
            self._files = {name: copies(shards) for name, shards in self._files.items()}
            self._written = ThreadPoolExecutor(1, "checkpoint").submit(self._write)

    @property
    def is_writing(self) -> bool:
        """True while the thread of this rank writes files."""
        return self._written is not None and not self._written.done()

    def finish(self) -> dict[str, dict]:
        """Return name -> manifest entry for the files of all ranks, once they are on the disk.

        Raises:
            SaveFailedError: On all ranks, if a file operation failed on any rank.
        """
        entries = self.on_all_ranks(self._written.result if self._written else self._write)
        return dict(sorted(item for part in entries for item in part.items()))

    def on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Call a function on this rank, and return its results on all ranks, in rank order.

        Raises:
            SaveFailedError: On all ranks, if it raised an OSError on any rank: that of the lowest
                one. Rank 0 removes the folder then. Other exceptions pass at once.
        """
        result = failure = None
        try:
            result = action()
        except OSError as error:
            free = None
            with suppress(OSError):
                free = free_bytes(self.folder.parent)
            number = error.errno or errno.EIO
            failure = SaveFailedError(
                number, self.folder.parent, self.needed_bytes, free, self.rank
            )
            failure.__cause__ = error
        outcomes = self.gather((failure, result))
        for failure, _ in outcomes:
            if failure is not None:
                if self.rank == 0:
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise failure
        return [result for _, result in outcomes]

    def _make_folder(self) -> None:
        """Make the folder on rank 0, if there is space, and remove what a failed save has left."""
        if self.rank != 0:
            return
        parent = self.folder.parent
        if free_bytes(parent) < self.needed_bytes:
            raise OSError(errno.ENOSPC, "too little space")
        if not parent.exists():
            os.mkdir(parent)
            fileops.sync_folder(parent.parent)
        fileops.remove_tree(self.folder)
        os.mkdir(self.folder)

    def _write(self) -> dict[str, dict]:
        """Write the files of this rank, and return their manifest entries by name."""
        entries = {}
        while self._files:  # each file's copies are freed when it is written
            name, shards = self._files.popitem()
            path = self.folder / name
            entries[name] = fileops.write_new_file(path, encode(shards), self.progress)
        if self.rank == 0:
            path, content = self.folder / REST_NAME, self._rest.getbuffer()
            entries[REST_NAME] = fileops.write_new_file(path, [content], self.progress)
        return entries


def copies(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """Return copies of shards in the memory of the host."""
    return {name: Shard(s.data.to("cpu", copy=True), s.offsets) for name, s in shards.items()}


def free_bytes(folder: Path) -> int:
    """Return the free space of the file system that holds a folder, in bytes. Ignores quotas.

    Args:
        folder: Folder. If it does not exist, its parent must exist, and counts instead.

    Raises:
        OSError: If neither exists.
    """
    return shutil.disk_usage(folder if folder.exists() else folder.parent).free

"""Save: one rank's part of a save, in which an error of one rank is raised on all ranks."""

import errno
import io
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gptrain.checkpoints import fileops
from gptrain.checkpoints.fileops import Gather, free_bytes, save_failed
from gptrain.checkpoints.manifest import REST_NAME
from gptrain.checkpoints.shards import Shard, Tensors, encode, plan_files, shard_of


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
        self._shards: dict[tuple[str, str], Shard] = {}
        self._rest = io.BytesIO()
        held = self.on_all_ranks(lambda: self._prepare(tensors, rest))
        self._files = plan_files(self._shards, held, rank)
        self._shards.clear()
        self._written = None
        if in_background:
            self.progress = None
            self.on_all_ranks(self._copy)
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

        Rank 0 removes the folder if it fails on any rank.

        Raises:
            SaveFailedError: On all ranks, if it raised an OSError on the lowest rank that failed.
            RuntimeError: On the other ranks, if it raised any other exception on that rank, which
                raises the exception itself.
        """
        result = error = failure = None
        try:
            result = action()
        except OSError as own:
            error = failure = save_failed(own, self.folder.parent, self.needed_bytes, self.rank)
            error.__cause__ = own
        except Exception as own:
            error, text = own, f"{type(own).__name__}: {own}"
            failure = RuntimeError(f"rank {self.rank} cannot save: {text}")
        outcomes = self.gather((failure, result))
        for rank, (failure, _) in enumerate(outcomes):
            if failure is not None:
                if self.rank == 0:
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise error if error is not None and rank == self.rank else failure
        return [result for _, result in outcomes]

    def _prepare(self, tensors: Mapping[str, Tensors], rest: Any) -> list:
        """Make the folder, and return the keys of `plan_files` of the shards of this rank."""
        if self.rank == 0:
            self._make_folder()
            torch.save(rest, self._rest)
        for kind in tensors:
            for name, tensor in tensors[kind].items():
                shard = shard_of(tensor)
                if shard.data.numel() or not tensor.numel():  # a rank may have no row of a tensor
                    self._shards[kind, name] = shard
        return [(*key, shard.offsets) for key, shard in self._shards.items()]

    def _copy(self) -> None:
        """Replace the shards of this rank by copies in the memory of the host."""
        self._files = {
            file: {name: s._replace(data=s.data.to("cpu", copy=True)) for name, s in part.items()}
            for file, part in self._files.items()
        }

    def _make_folder(self) -> None:
        """Make the folder if there is space, and remove what a failed save has left."""
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

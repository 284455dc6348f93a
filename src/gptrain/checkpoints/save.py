"""One rank's part of a save, in which an error of one rank is raised on all ranks."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gptrain.checkpoints import files
from gptrain.checkpoints.manifest import MANIFEST_NAME, REST_NAME, seal
from gptrain.checkpoints.tensors import Shard, Tensors, encode, shard_of


class Save:
    """One rank's part of a save. All ranks make this object, which starts to write in a thread.

    Then all ranks call `finish`, which waits for the thread and raises the same errors.

    Args:
        folder: Folder of the files, which rank 0 creates or empties. Its parent may be missing.
        manifest: Entries of the manifest except `files`. They may change until `finish`.
        tensors: MODEL or OPTIMIZER -> name -> tensor, or DTensor with the shard of this rank.
        rest: Value for torch.save that rank 0 writes into one more file. Other ranks ignore it.
        rank: Number of this rank.
        gather: Collective function that returns the values of all ranks, in a list by rank, on each
            of them. The default is for one rank.
        in_background: Whether to copy the tensors first, so that they may change before `finish`.

    Raises:
        SaveFailedError: On all ranks, if a file operation failed on any. The folder is removed.
        RuntimeError: In the same way, for any other error.
    """

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        tensors: Mapping[str, Tensors],
        rest: Any,
        *,
        rank: int = 0,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        in_background: bool = False,
    ) -> None:
        self.folder, self.manifest, self.rank, self.gather = folder, manifest, rank, gather
        self._rest = io.BytesIO()
        shards = {}
        for kind, named in tensors.items():
            for name, tensor in named.items():
                shard = shard_of(tensor)
                if shard.data.numel() or not tensor.numel():  # a rank may have no row of a tensor
                    shards[kind, name, shard.offsets] = shard
        held = self._on_all_ranks(lambda: self._begin(rest, list(shards)))
        self._files = _own_files(shards, held, rank)
        if in_background:
            self._on_all_ranks(self._copy)
        self.written = ThreadPoolExecutor(1, "checkpoint").submit(self._write)

    def finish(self, commit: Callable[[], object] = lambda: None) -> None:
        """Wait until the files of all ranks are on the disk, and write the manifest on rank 0.

        Rank 0 then calls `commit`. Collective; call it once. Raises as the constructor, also for an
        error of `commit`.
        """
        entries = self._on_all_ranks(self.written.result)
        self.manifest["files"] = dict(sorted(item for part in entries for item in part.items()))

        def complete() -> None:
            if self.rank == 0:
                files.replace(self.folder / MANIFEST_NAME, seal(self.manifest))
                commit()

        self._on_all_ranks(complete)

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Call a function on each rank and return the results of all; an error is raised on all."""
        result = cause = failure = None
        try:
            result = action()
        except Exception as error:
            cause = error
            failure = RuntimeError(f"rank {self.rank} cannot save: {type(error).__name__}: {error}")
            if isinstance(error, OSError):
                folder = str(self.folder.parent)
                failure = files.SaveFailedError(error.errno, folder, self.rank)
        outcomes = self.gather((failure, result))
        for failure, _ in outcomes:
            if failure is not None:
                if self.rank == 0:
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise failure from cause
        return [result for _, result in outcomes]

    def _begin(self, rest: Any, keys: list[tuple]) -> list[tuple]:
        """Make the folder on rank 0. Return `keys`, (kind, name, offsets), for the other ranks."""
        if self.rank == 0:
            parent = self.folder.parent
            if not parent.exists():
                os.mkdir(parent)
                files.sync_folder(parent.parent)
            shutil.rmtree(self.folder, ignore_errors=True)  # a failed save may have left it
            os.mkdir(self.folder)
            torch.save(rest, self._rest)
        return keys

    def _copy(self) -> None:
        """Replace the shards of this rank by copies in the memory of the host."""
        self._files = {
            file: {name: s._replace(data=s.data.to("cpu", copy=True)) for name, s in part.items()}
            for file, part in self._files.items()
        }

    def _write(self) -> dict[str, dict]:
        """Write the files of this rank, and return their manifest entries by name."""
        entries = {}
        while self._files:  # each file's copies are freed when it is written
            name, shards = self._files.popitem()
            entries[name] = files.write_new_file(self.folder / name, encode(shards))
        if self.rank == 0:
            rest = [self._rest.getbuffer()]
            entries[REST_NAME] = files.write_new_file(self.folder / REST_NAME, rest)
        return entries


def _own_files(
    shards: Mapping[tuple, Shard], held: list[list[tuple]], rank: int
) -> dict[str, dict[str, Shard]]:
    """Return file name -> name -> shard that this rank writes, the first with its key in `held`."""
    writers = {key: number for number in reversed(range(len(held))) for key in held[number]}
    kinds = {kind for kind, _, _ in writers}
    ranks_of = {kind: sorted({n for key, n in writers.items() if key[0] == kind}) for kind in kinds}
    own: dict[str, dict[str, Shard]] = {}
    for (kind, name, offsets), shard in shards.items():
        if writers[kind, name, offsets] == rank:
            ranks = ranks_of[kind]
            part = f"-{ranks.index(rank) + 1:05d}-of-{len(ranks):05d}" if len(ranks) > 1 else ""
            own.setdefault(f"{kind}{part}.safetensors", {})[name] = shard
    return own

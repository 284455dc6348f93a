"""One rank's part of a save, in which an error of one rank is raised on all ranks."""

import io
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from gptrain.checkpoints import files
from gptrain.checkpoints.manifest import MANIFEST_NAME, REST_NAME, Manifest, hidden, seal
from gptrain.checkpoints.tensors import Key, Tensors, encode, shard_of


@dataclass(eq=False)
class Save:
    """One rank's part of a save, which all ranks `begin` and then `finish`.

    The files are written into a hidden folder, which is renamed to `path` at the end. Both methods
    are collective. They raise a SaveFailedError on all ranks if a file operation failed on any, and
    a RuntimeError in the same way for any other error. The hidden folder is removed then.

    Attributes:
        path: Folder that the save becomes. An existing one is replaced.
        manifest: Entries of the manifest. `metrics` may change until `finish`.
        rank: Number of this rank.
        gather: Collective function that returns the values of all ranks, in a list by rank, on each
            of them. The default is for one rank.
        written: Future of the thread that writes the files of this rank.
    """

    path: Path
    manifest: Manifest
    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def begin(self, tensors: Mapping[str, Tensors], rest: Any, in_background: bool) -> None:
        """Start to write the files of this rank in a thread.

        Args:
            tensors: MODEL or OPTIMIZER -> name -> tensor, or DTensor with the shard of this rank.
            rest: Value for torch.save that rank 0 writes into one more file.
            in_background: Whether to copy the tensors first, so that they may change meanwhile.
        """
        shards: dict[Key, torch.Tensor] = {}
        for kind, named in tensors.items():
            for name, tensor in named.items():
                shard, first = shard_of(tensor)
                if shard.numel() or not tensor.numel():  # a rank may have no row of a tensor
                    shards[kind, name, first] = shard
        held = self.gather({*shards})
        earlier = set().union(*held[: self.rank])  # the first rank that holds a shard writes it
        own = {key: shard for key, shard in shards.items() if key not in earlier}
        self._on_all_ranks(lambda: self._prepare(own, rest, in_background))
        part = "" if held[0] == set().union(*held) else f"-{self.rank:05d}"
        self.written = ThreadPoolExecutor(1, "checkpoint").submit(self._write, own, part)

    def finish(self) -> None:
        """Wait until the files of all ranks are on the disk, and give the folder its name."""
        entries = self._on_all_ranks(self.written.result)
        self.manifest.files = dict(sorted(item for part in entries for item in part.items()))
        self._on_all_ranks(self._commit)

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Call a function on each rank and return the results of all; an error is raised on all."""
        result = cause = failure = None
        try:
            result = action()
        except Exception as error:
            cause = error
            failure = RuntimeError(f"rank {self.rank} cannot save: {type(error).__name__}: {error}")
            if isinstance(error, OSError):
                failure = files.SaveFailedError(error.errno, str(self.path.parent), self.rank)
        outcomes = self.gather((failure, result))
        for failure, _ in outcomes:
            if failure is not None:
                if self.rank == 0:
                    shutil.rmtree(hidden(self.path), ignore_errors=True)
                raise failure from cause
        return [result for _, result in outcomes]

    def _prepare(self, own: dict[Key, torch.Tensor], rest: Any, in_background: bool) -> None:
        """Make the folder on rank 0, and copy, in place, what may change while it is written."""
        if self.rank == 0:
            shutil.rmtree(hidden(self.path), ignore_errors=True)  # a killed start may have left it
            os.makedirs(hidden(self.path))
            files.sync_folder(self.path.parent.parent)  # the first save has made the parent
            self._rest = io.BytesIO()
            torch.save(rest, self._rest)
            self._rest.seek(0)
            if foreign := get_unsafe_globals_in_checkpoint(self._rest):
                raise TypeError(f"a state holds {foreign[0]}; allowed: tensors, plain values")
        if in_background:
            own.update({key: shard.to("cpu", copy=True) for key, shard in own.items()})

    def _write(self, own: dict[Key, torch.Tensor], part: str) -> dict[str, dict[str, Any]]:
        """Write the files of this rank, and return their manifest entries by name."""
        folder, entries = hidden(self.path), {}
        for kind in {kind for kind, _, _ in own}:
            # `encode` takes each tensor out of `shards`, so that a copy is freed when it is written
            shards = {key: own.pop(key) for key in [*own] if key[0] == kind}
            name = f"{kind}{part}.safetensors"
            entries[name] = files.write_new_file(folder / name, encode(shards))
        if self.rank == 0:
            entries[REST_NAME] = files.write_new_file(folder / REST_NAME, [self._rest.getbuffer()])
        return entries

    def _commit(self) -> None:
        """Write the manifest and rename the folder, on rank 0."""
        if self.rank == 0:
            files.replace(hidden(self.path) / MANIFEST_NAME, seal(self.manifest.model_dump()))
            shutil.rmtree(self.path, ignore_errors=True)
            os.rename(hidden(self.path), self.path)
            files.sync_folder(self.path.parent)

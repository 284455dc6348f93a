"""torch.distributed.checkpoint, written into a draft: every rank its shard, one manifest for all.

with store.writing(step, kind="sharded", rank=rank, gather=gather) as draft:
    dcp.save(state, storage_writer=ShardWriter(draft))
dcp.load(state, storage_reader=SafeFileSystemReader(store.newest_good().path))
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from gptrain.resilience.draft import Draft


class ShardWriter(FileSystemWriter):
    """Writes through `Draft.open`: hashed, synced and counted like every file of a save.

    The draft keeps a file's error for the end of the save, so that no rank leaves the collectives
    of torch.distributed.checkpoint alone.
    """

    def __init__(self, draft: Draft) -> None:
        # Nothing is copied ahead: what is, _OverlappingCpuLoader of the writer's module leaves
        # page-locked until the file is closed, a second copy of the whole state on the host.
        super().__init__(
            draft.path,
            sync_files=False,  # the draft's files sync themselves
            per_thread_copy_ahead=0,
        )
        self.fs = _DraftFolder(draft)

    def storage_meta(self) -> None:
        """Nothing: it would hold the draft's path, which is gone after the save."""


class _DraftFolder(FileSystem):
    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def create_stream(
        self, path: str | os.PathLike, mode: str
    ) -> AbstractContextManager[IO[bytes]]:
        # The index comes as .metadata.tmp, to be renamed: a draft needs no second layer of it.
        return self._draft.open(Path(path).name.removesuffix(".tmp"))

    def mkdir(self, path: str | os.PathLike) -> None:
        """The draft has its folder."""

    def exists(self, path: str | os.PathLike) -> bool:
        return False

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Written under its final name already."""

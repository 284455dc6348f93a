"""torch's files: loaded without running code, whoever wrote them; and shards written into a draft.

    with store.writing(step, kind="sharded", rank=rank, gather=gather) as draft:
        dcp.save(state, storage_writer=ShardWriter(draft))
    dcp.load(state, storage_reader=SafeFileSystemReader(store.newest_good().path))

A pickle names functions and calls them; whoever unpickles it freely runs them. torch.load with
`weights_only=True` refuses names it does not know, and this is the only way of loading used here.
torch.distributed.checkpoint unpickles freely in two places, whatever it is told: `.metadata`, and
every value that is not a tensor. `SafeFileSystemReader` closes both.
"""

import io
import os
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.futures import Future

from gptrain.checkpoints.manifest import DamagedCheckpointError, is_file_name
from gptrain.checkpoints.writer import CheckpointWriter
from gptrain.core.errors import first_line
from gptrain.core.small_files import open_regular, read_bytes

# Exactly what torch 2.11 to 2.13 write into .metadata: data classes, sizes and names of dtypes.
_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata",
        "TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}  # fmt: skip
_ENTRIES = (BytesStorageMetadata, TensorStorageMetadata)
# What unpickling of arbitrary bytes raises.
_GARBAGE = (
    pickle.UnpicklingError, zipfile.BadZipFile, struct.error, ArithmeticError, AssertionError,
    AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, StopIteration,
    TypeError, ValueError,
)  # fmt: skip


class UnsafeCheckpointError(DamagedCheckpointError):
    """A file that would run foreign code if it were loaded freely."""


def load_file(path: str | Path, *, mmap: bool = False) -> Any:
    """The tensors (on the CPU) and plain values of a file that torch.save wrote.

    Args:
        mmap: leave the tensors in the file until they are used: halves the peak memory where they
            are copied to a device. They die with the file: not for a state that trains on the CPU.
    Raises: UnsafeCheckpointError, DamagedCheckpointError, FileNotFoundError.
    """
    with one_line_errors(path), open_regular(path) as file:
        is_mapped = mmap and zipfile.is_zipfile(file)
        file.seek(0)
        return _load(path if is_mapped else file, mmap=is_mapped)


@contextmanager
def one_line_errors(path: str | Path) -> Generator[None, None, None]:
    """Makes one UnsafeCheckpointError or DamagedCheckpointError of all that loading from
    path may raise.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except _GARBAGE as error:
        if refused := re.search(r"GLOBAL (\w\S*\.\w+)", str(error)):
            name = re.sub(r"^posix\.", "os.", refused[1])  # os.system pickles as posix.system
            reason = f"contains {name}; refused, only tensors and plain values are loaded"
            raise UnsafeCheckpointError(path, reason) from error
        # torch's first advice on a pickle that it cannot read is to load it freely, code and all.
        is_pickle = isinstance(error, pickle.UnpicklingError | LookupError)
        said = "no file that torch.save wrote" if is_pickle else first_line(error)
        raise DamagedCheckpointError(path, f"not a checkpoint ({said})") from error


class SafeFileSystemReader(FileSystemReader):
    """torch.distributed.checkpoint's reader for folders that need not be trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The folder's index, of whose classes none can do anything.

        Raises: UnsafeCheckpointError, DamagedCheckpointError.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with one_line_errors(path):
            if not path.exists():
                raise ValueError("it is missing")
            metadata = _MetadataUnpickler(io.BytesIO(read_bytes(path))).load()
            for entry in metadata.storage_data.values():
                if not is_file_name(entry.relative_path):
                    raise ValueError(f"its shards are in {entry.relative_path}")
            if not all(isinstance(v, _ENTRIES) for v in metadata.state_dict_metadata.values()):
                raise ValueError("its index has an entry of another kind")
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the plan's tensors and values."""
        with one_line_errors(os.fspath(self.path)):
            return super().read_data(plan, cast(LoadPlanner, _PlainValues(planner)))


class ShardWriter(FileSystemWriter):
    """Writes through `Draft.open`: hashed, synced and counted like every file of a save.

    The draft keeps a file's error for the end of the save, so that no rank leaves the collectives
    of torch.distributed.checkpoint alone.
    """

    def __init__(self, draft: CheckpointWriter) -> None:
        # Nothing is copied ahead: what is, _OverlappingCpuLoader of the writer's module leaves
        # page-locked until the file is closed, a second copy of the whole state on the host.
        super().__init__(draft.path, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _DraftFolder(draft)  # whose files sync themselves

    def storage_meta(self) -> None:
        """Nothing: it would hold the draft's path, which is gone after the save."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        # So do Python 3.11.0 to 3.11.3, of which Debian 12 has one, write a member of an enum.
        if (module, name) == ("builtins", "getattr"):
            return lambda _, member: _MEM_FORMAT_ENCODING[member]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


class _PlainValues:
    """A planner that is given only bytes that this process has pickled itself.

    torch's own planner loads with weights_only=False, so a value is loaded safely here and, being
    plain, saved again for it. The values are counters and settings, a few bytes each.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        ours = io.BytesIO()
        torch.save(_load(value), ours)
        ours.seek(0)
        self._planner.load_bytes(read_item, ours)


def _load(file: str | Path | IO[bytes], mmap: bool = False) -> Any:
    with warnings.catch_warnings():  # about pickles not made by torch.save: those end in an error
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(file, "cpu", weights_only=True, mmap=mmap)


class _DraftFolder(FileSystem):
    def __init__(self, draft: CheckpointWriter) -> None:
        self._draft = draft

    def create_stream(  # ty: ignore[incompatible-method-override]  # torch's is a generator
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

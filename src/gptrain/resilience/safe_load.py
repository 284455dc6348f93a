"""Loading a file somebody else may have written: tensors and plain values, never code.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.futures import Future

from gptrain.resilience.manifest import DamagedCheckpoint, is_file_name
from gptrain.small_files import UnreadableFile, open_regular, read_bytes

# torch's weights-only unpickler is Python and reads about 1 MB/s; a tensor takes 200 bytes of it.
MAX_PICKLE_BYTES = 16 * 2**20
MAX_INDEX_BYTES = 2**27  # `.metadata`: about 200 bytes for each shard of each tensor
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


class UnsafeCheckpoint(DamagedCheckpoint):
    """A file that would run foreign code if it were loaded freely."""


def load_file(path: str | Path, *, mmap: bool = False) -> Any:
    """The tensors (on the CPU) and plain values of a file that torch.save wrote.

    Args:
        mmap: leave the tensors in the file until they are used: halves the peak memory where they
            are copied to a device. They die with the file: not for a state that trains on the CPU.
    Raises: UnsafeCheckpoint, DamagedCheckpoint, FileNotFoundError; ValueError for a remote path.
    """
    if "://" in str(path):
        raise ValueError(
            f"{path}: remote checkpoints are off; download, check the hash, pass a local path"
        )
    with one_line_refusals(path), open_regular(path) as file:
        mmap = _check_size(file) and mmap
        return _load(Path(path) if mmap else file, mmap)


@contextmanager
def one_line_refusals(path: str | Path) -> Iterator[None]:
    """Makes one UnsafeCheckpoint or DamagedCheckpoint of all that loading from path may raise."""
    try:
        yield
    except FileNotFoundError:
        raise
    except CheckpointException as error:  # of torch.distributed.checkpoint, the same on all ranks
        first = next((failure for failure, _ in error.failures.values()), error)
        raise _refusal(path, first) from error
    except _GARBAGE as error:
        raise _refusal(path, error) from error


class SafeFileSystemReader(FileSystemReader):
    """torch.distributed.checkpoint's reader for folders that need not be trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The folder's index, of whose classes none can do anything.

        Raises: UnsafeCheckpoint, DamagedCheckpoint.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with one_line_refusals(path):
            if not path.exists():
                raise DamagedCheckpoint(path.parent, f"{path.name} is missing")
            index = io.BytesIO(read_bytes(path, MAX_INDEX_BYTES))
            metadata = _MetadataUnpickler(index, path).load()
            for entry in metadata.storage_data.values():
                if not is_file_name(entry.relative_path):
                    raise _unsafe(path.parent, f"the path {entry.relative_path}")
            for name, entry in metadata.state_dict_metadata.items():
                if not isinstance(name, str) or type(entry) not in _ENTRIES:
                    raise ValueError(f"its index has an entry of another kind: {name!s:.80}")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the plan's tensors and values."""
        with one_line_refusals(self.path):
            return super().read_data(plan, _PlainValues(planner, Path(self.path)))


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _unsafe(self._path, f"{module}.{name}")


class _PlainValues:
    """A planner that is given only bytes that this process has pickled itself.

    torch's own planner loads with weights_only=False, so a value is loaded safely here and, being
    plain, saved again for it. The values are counters and settings, a few bytes each.
    """

    def __init__(self, planner: LoadPlanner, path: Path) -> None:
        self._planner, self._path = planner, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        with one_line_refusals(self._path):
            _check_size(value)
            plain = _load(value)
        ours = io.BytesIO()
        torch.save(plain, ours)
        ours.seek(0)
        self._planner.load_bytes(read_item, ours)


def _check_size(file: IO[bytes]) -> bool:
    """Whether it is torch's archive and not a bare pickle, after its pickles were found small.

    Raises: ValueError.
    """
    is_archive = zipfile.is_zipfile(file)
    if is_archive:
        members = zipfile.ZipFile(file).infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("a compressed archive, which torch.save does not write")
        n_bytes = sum(member.file_size for member in members if "/data/" not in member.filename)
    else:
        n_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    if n_bytes > MAX_PICKLE_BYTES:
        what = "its pickle has" if is_archive else "not torch's archive, and"
        raise ValueError(f"{what} {n_bytes} bytes: at most {MAX_PICKLE_BYTES} are read")
    return is_archive


def _load(source: Any, mmap: bool | None = None) -> Any:
    with warnings.catch_warnings():  # about pickles not made by torch.save: those end in an error
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def _refusal(path: str | Path, error: BaseException) -> DamagedCheckpoint:
    if isinstance(error, DamagedCheckpoint):
        return error
    if refused := re.search(r"GLOBAL (\w\S*\.\w+)", str(error)):
        return _unsafe(path, refused[1])
    # What torch met, without its advice: that is to load the file freely, code and all.
    met = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    said = met[1] if met else (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, LookupError) or "weights_only" in said:
        said = "no file that torch.save wrote"
    if isinstance(error, UnreadableFile):
        said = error.reason
    said = re.sub(r"^\[enforce fail.*?\] \. ", "", said).split(". ")[0].strip()
    return DamagedCheckpoint(path, f"not a checkpoint ({said})")


def _unsafe(path: Path | str, what: str) -> UnsafeCheckpoint:
    what = re.sub(r"^(posix|nt)\.", "os.", what)  # os.system pickles as posix.system
    reason = f"contains {what}; refused, only tensors and plain values are loaded"
    return UnsafeCheckpoint(path, reason)

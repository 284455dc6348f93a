"""Load torch's files without running code in them, and write shards into a checkpoint.

    with store.writing(step, kind="sharded", rank=rank, gather=gather) as draft:
        dcp.save(state, storage_writer=ShardWriter(draft))
    dcp.load(state, storage_reader=SafeFileSystemReader(store.newest_intact().path))

A pickle may call any function, so unpickling an untrusted file runs its author's code. torch.load
with `weights_only=True` refuses unknown names, and gptrain loads files in this way only.
torch.distributed.checkpoint unpickles without this protection in two places: the `.metadata` file,
and every value that is not a tensor. `SafeFileSystemReader` protects both.
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

# The only names that torch 2.11 to 2.13 write into .metadata. Dtypes are allowed, too.
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
# The exceptions that unpickling of arbitrary bytes may raise.
_UNPICKLING_ERRORS = (
    pickle.UnpicklingError, zipfile.BadZipFile, struct.error, ArithmeticError, AssertionError,
    AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, StopIteration,
    TypeError, ValueError,
)  # fmt: skip


class UnsafeCheckpointError(DamagedCheckpointError):
    """Raised if a file contains anything but tensors and plain values. It was not loaded.

    Loading such a file without protection could run code in it.
    """


def load_file(path: str | Path, *, mmap: bool = False) -> Any:
    """Load a file of torch.save without running code in it, and return its content on the CPU.

    Args:
        path: Path of the file.
        mmap: Whether the tensors stay in the file until they are used. That halves the peak memory
            if they are copied to a device afterwards. Do not use it for a state that is trained on
            the CPU, because the tensors become invalid if the file is removed or changed. Ignored
            for a file in torch's old format, which is no zip file.

    Raises:
        UnsafeCheckpointError: If the file contains anything but tensors and plain values.
        DamagedCheckpointError: If the file is damaged, or no file of torch.save.
        FileNotFoundError: If the file is missing.
    """
    with one_line_errors(path), open_regular(path) as file:
        is_mapped = mmap and zipfile.is_zipfile(file)
        file.seek(0)
        return _load(path if is_mapped else file, mmap=is_mapped)


@contextmanager
def one_line_errors(path: str | Path) -> Generator[None, None, None]:
    """Turn an error of loading a file into one of two errors with a message of one line.

    Args:
        path: File or folder that the block loads.

    Raises:
        UnsafeCheckpointError: If the block has refused a name in a file that is not allowed.
        DamagedCheckpointError: If the block raises any other error that unpickling may raise. A
            FileNotFoundError passes unchanged.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except _UNPICKLING_ERRORS as error:
        refused = re.search(r"GLOBAL (\w\S*\.\w+)", str(error))
        if refused:
            name = re.sub(r"^posix\.", "os.", refused[1])  # os.system pickles as posix.system
            reason = f"contains {name}; refused: only tensors and plain values are loaded"
            raise UnsafeCheckpointError(path, reason) from error
        # Do not print torch's message: it advises to load the file without protection.
        is_pickle_error = isinstance(error, pickle.UnpicklingError | LookupError)
        reason = "not a file of torch.save" if is_pickle_error else first_line(error)
        raise DamagedCheckpointError(path, f"not a checkpoint ({reason})") from error


class SafeFileSystemReader(FileSystemReader):
    """Reader of torch.distributed.checkpoint that executes no code from the files that it reads.

    FileSystemReader unpickles the index and the values that are no tensors, which may call any
    function. This reader loads an index, tensors and plain values only. For anything else it raises
    UnsafeCheckpointError, and DamagedCheckpointError for a damaged file or an index that refers to
    files outside the folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of the shards from the file `.metadata`, without running code in it.

        torch.distributed.checkpoint calls this method when it loads a checkpoint.

        Args:
            *args: Ignored.
            **kwargs: `rank`, if each rank has its own index.

        Raises:
            UnsafeCheckpointError: If the file contains a name that such an index does not need.
            DamagedCheckpointError: If the file is missing or damaged, or refers to files outside
                the folder.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with one_line_errors(path):
            if not path.exists():
                raise ValueError("the file is missing")
            metadata = _MetadataUnpickler(io.BytesIO(read_bytes(path))).load()
            for entry in metadata.storage_data.values():
                if not is_file_name(entry.relative_path):
                    raise ValueError(f"its shards are outside the folder: {entry.relative_path}")
            if not all(isinstance(v, _ENTRIES) for v in metadata.state_dict_metadata.values()):
                raise ValueError("an entry is neither a tensor nor a plain value")
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load the tensors and values of a plan into the state that is being loaded.

        torch.distributed.checkpoint calls this method after `read_metadata`.

        Args:
            plan: List of the tensors and values that this rank reads.
            planner: Object that puts them into the state.

        Returns:
            The future of torch's reader.

        Raises:
            UnsafeCheckpointError: If a value is anything but a plain value.
            DamagedCheckpointError: If a file is damaged.
        """
        with one_line_errors(os.fspath(self.path)):
            return super().read_data(plan, cast(LoadPlanner, _PlainValues(planner)))


class ShardWriter(FileSystemWriter):
    """Writer of torch.distributed.checkpoint that writes through a CheckpointWriter.

    So the shards are hashed and synced like every file of a save. The CheckpointWriter reports a
    failed write at the end of the save, after the collective operations of
    torch.distributed.checkpoint: an exception between them would leave the other ranks waiting for
    this rank.

    Args:
        draft: Writer of this rank's files.
    """

    def __init__(self, draft: CheckpointWriter) -> None:
        # Copy no tensor ahead of its write: torch's _OverlappingCpuLoader keeps such copies in
        # page-locked memory until the file is closed, a second copy of the full state on the host.
        super().__init__(draft.path, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _DraftFolder(draft)

    def storage_meta(self) -> None:
        """Return None, so that the index does not contain the path of the unfinished checkpoint.

        Its folder is renamed later.
        """


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that creates only dtypes and the classes of torch's index of shards."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or dtype of this name, if it is allowed. pickle calls this method.

        Args:
            module: Name of the module.
            name: Name in the module.

        Raises:
            UnpicklingError: If the name is not allowed.
        """
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        # Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickle a member of an enum as a getattr.
        if (module, name) == ("builtins", "getattr"):
            return lambda _, member: _MEM_FORMAT_ENCODING[member]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


class _PlainValues:
    """Wrapper of a load planner that protects it from values whose pickle would run code.

    torch's planner unpickles values with weights_only=False. So each value is loaded here with
    weights_only=True, and pickled again for the planner. The values are small counters and options.

    Args:
        planner: Load planner of torch.distributed.checkpoint, which gets all other calls.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Load a value that is no tensor with weights_only=True, and pass it to the planner.

        Args:
            read_item: Item of the load plan.
            value: Pickled value.

        Raises:
            UnpicklingError: If the value is anything but a tensor or a plain value.
        """
        safe_value = io.BytesIO()
        torch.save(_load(value), safe_value)
        safe_value.seek(0)
        self._planner.load_bytes(read_item, safe_value)


def _load(file: str | Path | IO[bytes], mmap: bool = False) -> Any:
    """Load a file of torch.save onto the CPU with weights_only=True, and return its content.

    Args:
        file: Path, or open file.
        mmap: Whether tensors stay in the file, which must then be a path.

    Raises:
        UnpicklingError: If the file contains anything but tensors and plain values. A damaged file
            may raise many other exceptions, which are listed in `_UNPICKLING_ERRORS`.
    """
    with warnings.catch_warnings():  # a pickle that torch.save did not write raises an error anyway
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(file, "cpu", weights_only=True, mmap=mmap)


class _DraftFolder(FileSystem):
    """File system for torch.distributed.checkpoint whose files are those of a CheckpointWriter.

    Args:
        draft: Writer of this rank's files.
    """

    def __init__(self, draft: CheckpointWriter) -> None:
        self._draft = draft

    def create_stream(  # ty: ignore[incompatible-method-override]  # torch's is a generator
        self, path: str | os.PathLike, mode: str
    ) -> AbstractContextManager[IO[bytes]]:
        """Create a file of the unfinished checkpoint and return it, open for writing.

        Args:
            path: Path that torch would write to. Only its file name counts, without `.tmp`.
            mode: Mode of the file, which has no effect.
        """
        # torch writes .metadata.tmp and renames it. The draft's folder is renamed after all files
        # were written, so .metadata can have its final name from the start.
        return self._draft.open(Path(path).name.removesuffix(".tmp"))

    def mkdir(self, path: str | os.PathLike) -> None:
        """Do nothing, because the folder of the unfinished checkpoint exists already."""

    def exists(self, path: str | os.PathLike) -> bool:
        """Return False, because the unfinished checkpoint has no file of this name yet."""
        return False

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Do nothing, because `create_stream` has used the final name."""

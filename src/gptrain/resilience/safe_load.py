"""Loading a file somebody else may have written: tensors and plain values, never code.

A pickle names functions and calls them; whoever unpickles it freely runs them. torch.load with
`weights_only=True` refuses names it does not know, and this is the only way of loading used here.
torch.distributed.checkpoint has two free ways in, whatever it is told: `pickle.load` of
`.metadata`, and `weights_only=False` for every value that is not a tensor; `SafeFileSystemReader`
closes both. What a refused file wanted to call is named by reading its pickle, not running it.
"""

import contextlib
import io
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.futures import Future

from gptrain.resilience.manifest import DamagedCheckpoint

# Exactly what torch 2.11 to 2.13 write into .metadata: data classes, sizes and names of dtypes.
_DCP = "torch.distributed.checkpoint"
_METADATA_NAMES = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
# What unpickling of arbitrary bytes raises, apart from OSError.
_GARBAGE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
_PUBLIC_NAMES = {"posix": "os", "nt": "os"}  # os.system pickles as posix.system


class UnsafeCheckpoint(Exception):
    """A file that would run foreign code if it were loaded freely; `what` is the code's name."""

    def __init__(self, path: str | Path, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(
            f"{path}: contains {what}; refused, only tensors and plain values are loaded"
        )

    def __reduce__(self) -> tuple:
        return type(self), (self.path, self.what)


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
    path = Path(path)
    with path.open("rb") as file:
        mmap = mmap and zipfile.is_zipfile(file)
        file.seek(0)
        try:
            return _load(path if mmap else file, mmap)
        except (OSError, *_GARBAGE) as error:
            raise _refusal(path, file, error) from error


class SafeFileSystemReader(FileSystemReader):
    """torch.distributed.checkpoint's reader for folders that need not be trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The folder's index, of whose classes none can do anything.

        Raises: UnsafeCheckpoint, DamagedCheckpoint.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file, path).load()
            places = [entry.relative_path for entry in metadata.storage_data.values()]
        except FileNotFoundError:
            raise DamagedCheckpoint(path.parent, f"{path.name} is missing") from None
        except _GARBAGE as error:
            reason = f"{path.name} is no index ({_first_line(error)})"
            raise DamagedCheckpoint(path.parent, reason) from error
        for place in places:
            if Path(place).name != place:
                raise UnsafeCheckpoint(path.parent, f"the path {place}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's tensors and values."""
        return super().read_data(plan, _PlainValues(planner, Path(self.path)))


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedReader, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UnsafeCheckpoint(self._path, _public_name(module, name))


class _PlainValues:
    """A planner that is handed only bytes that this process has pickled itself.

    torch's own planner loads with weights_only=False, so a value is loaded safely here and, being
    plain, saved again for it. The values are counters and settings, a few bytes each.
    """

    def __init__(self, planner: LoadPlanner, path: Path) -> None:
        self._planner, self._path = planner, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            plain = _load(value)
        except _GARBAGE as error:
            raise _refusal(self._path, value, error) from error
        ours = io.BytesIO()
        torch.save(plain, ours)
        ours.seek(0)
        self._planner.load_bytes(read_item, ours)


def _load(source: Any, mmap: bool | None = None) -> Any:
    with warnings.catch_warnings():  # about pickles not made by torch.save: those end in an error
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def _refusal(path: Path, stream: IO[bytes], error: Exception) -> Exception:
    refused = re.search(r"GLOBAL (\S+)\.(\w+)", str(error))  # torch says it where it got that far
    names = [_public_name(*refused.groups())] if refused else _foreign_names(stream)
    if names:
        return UnsafeCheckpoint(path, ", ".join(names))
    return DamagedCheckpoint(path, f"not a checkpoint ({_reason(error)})")


def _foreign_names(stream: IO[bytes]) -> list[str]:
    """Names outside torch in a pickle, bare or in torch's archive; the pickle is not run."""
    names: dict[str, None] = {}  # in order, each once
    strings: list[str] = []
    with contextlib.suppress(OSError, *_GARBAGE):  # where the pickles end
        if zipfile.is_zipfile(stream):
            archive = zipfile.ZipFile(stream)
            inner = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            stream = io.BytesIO(archive.read(inner))
        stream.seek(0)
        while True:  # torch's older format is several pickles in a row
            for operation, argument, _ in pickletools.genops(stream):
                if operation.name == "GLOBAL":
                    module, _, name = argument.partition(" ")
                elif operation.name == "STACK_GLOBAL":
                    module, name = strings[-2:]
                else:
                    strings += [argument] if isinstance(argument, str) else []
                    continue
                if module.split(".")[0] not in ("torch", "collections"):
                    names[_public_name(module, name)] = None
    return list(names)


def _public_name(module: str, name: str) -> str:
    return f"{_PUBLIC_NAMES.get(module, module)}.{name}"


def _reason(error: Exception) -> str:
    """What torch met, without its advice: that is to load the file freely, code and all."""
    met = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    said = met[1] if met else _first_line(error)
    if isinstance(error, LookupError) or "weights_only" in said:
        said = "no file that torch.save wrote"
    return re.sub(r"^\[enforce fail.*?\] \. ", "", said).split(". ")[0].strip()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

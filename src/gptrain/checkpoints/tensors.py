"""Tensors in safetensors files, each rank's shards in files of its own; and files of torch.save.

The safetensors files have the layout of torch.distributed.checkpoint: its HuggingFaceStorageReader
reads them, and `safetensors` opens the files of one rank directly. torch's own writer is not used,
because it holds all tensors and the full text of the file in memory; here a rank needs the memory
of one tensor. Reading maps the files and copies only what a rank needs.
"""

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import Tensor
from torch.distributed.tensor import DTensor

from gptrain.checkpoints.manifest import DamagedCheckpointError
from gptrain.core.small_files import open_regular

MODEL, OPTIMIZER = "model", "optimizer"  # beginnings of the names of the files
SHARDING = "DCP_SHARDING_INFO"  # torch's entry of a file's header
# dtype -> name in a file's header. torch reads this table of safetensors, too.
_NAMES: dict[Any, Any] = {dtype: name for name, dtype in _TYPES.items()}
Tensors = Mapping[str, Tensor]
Index = tuple[int, ...]  # an index or a size in each dimension
Box = list[range]  # indices of the full tensor in each dimension
Key = tuple[str, str, Index]  # kind, such as MODEL, name and first index of a shard


def shard_of(tensor: Tensor) -> tuple[Tensor, Index]:
    """Return the values that this rank holds of a tensor, and the first index of them."""
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()  # torch.distributed.checkpoint calls it, too
        return tensor.to_local().detach(), tuple(chunk.offsets)
    return tensor.detach(), (0,) * tensor.ndim


def box_of(first: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the indices of a shard within the full tensor."""
    return [range(begin, begin + n) for begin, n in zip(first, shape, strict=True)]


def slices(indices: Box, box: Box) -> tuple[slice, ...]:
    """Return the slices of a shard that select these indices of the full tensor."""
    pairs = zip(indices, box, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def encode(shards: dict[Key, Tensor]) -> Iterator[memoryview | bytes]:
    """Yield the content of a safetensors file, one tensor at a time, and empty `shards`."""
    # Readers need the values of a tensor at a multiple of their size.
    order = sorted(shards, key=lambda key: (-shards[key].element_size(), key))
    places = {name: {"saved_offsets": first} for _, name, first in order}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", SHARDING: json.dumps(places)}}
    end = 0
    for key in order:
        shard, begin = shards[key], end
        end += shard.nbytes
        values = {"dtype": _NAMES[shard.dtype], "shape": [*shard.shape]}
        header[key[1]] = values | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for key in order:
        yield memoryview(shards.pop(key).cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


class SavedTensors:
    """Tensors in files or in memory, of which each rank reads its part. No call is collective.

    Args:
        source: Folder of a checkpoint, or of a net of transformers; one safetensors file; or full
            tensors in memory by their names. A folder without such files has no tensors.
        kind: MODEL or OPTIMIZER: which of the files in a folder are read.

    Attributes:
        shapes: Name -> shape of the full tensor.
        dtypes: Name -> dtype.

    Raises:
        DamagedCheckpointError: If a file is no safetensors file, or if shards are missing.
        OSError, UnreadableFileError: If a file cannot be opened.
    """

    def __init__(self, source: Path | Tensors, kind: str = MODEL) -> None:
        self.shapes: dict[str, Index] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        # Name -> file or tensor, and indices within the full tensor, of each shard.
        self._parts: dict[str, list[tuple[Path | Tensor, Box]]] = {}
        if isinstance(source, Mapping):
            for name, tensor in source.items():
                self._add(name, tensor, tensor.dtype, box_of((0,) * tensor.ndim, tensor.shape))
            return
        paths = [source] if source.is_file() else sorted(source.glob(f"{kind}*.safetensors"))
        for path in paths:
            number = re.search(r"-of-(\d+)$", path.stem)  # transformers numbers its files so
            if number and path != source and len(paths) != int(number[1]):
                raise DamagedCheckpointError(source, f"{path.name} is one of {len(paths)} files")
            file = open_file(path)
            try:
                places = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
                for name in file.keys():  # noqa: SIM118, it is no mapping
                    tensor = file.get_tensor(name)  # stays mapped
                    first = places.get(name, {}).get("saved_offsets", [0] * tensor.ndim)
                    self._add(name, path, tensor.dtype, box_of(first, tensor.shape))
            except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
                raise DamagedCheckpointError(path, f"no shards of gptrain ({error})") from error
        for name, parts in self._parts.items():
            if sum(prod(map(len, box)) for _, box in parts) != prod(self.shapes[name]):
                raise DamagedCheckpointError(source, f"parts of {name} are missing")

    def _add(self, name: str, data: Path | Tensor, dtype: torch.dtype, box: Box) -> None:
        """Add a shard."""
        ends = [indices.stop for indices in box]
        self.shapes[name] = tuple(map(max, ends, self.shapes.get(name, ends)))
        self.dtypes[name] = dtype
        self._parts.setdefault(name, []).append((data, box))

    @torch.no_grad()
    def read(self, tensors: Tensors) -> None:
        """Copy the saved values into these tensors, or this rank's shards of DTensors, by name.

        If the sizes differ, the values at indices that both tensors have are copied. Values of
        another dtype are converted. Raises a KeyError for a name that is not in `shapes`.
        """
        for name, tensor in tensors.items():
            local, first = shard_of(tensor)
            own = box_of(first, local.shape)
            for data, box in self._parts[name]:
                pairs = zip(own, box, strict=True)
                common = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs]
                if all(common):  # no dimension is empty
                    # Each part opens its file again: an open file keeps the pages that were read
                    # in the memory of the process.
                    part = data if isinstance(data, Tensor) else open_file(data).get_slice(name)
                    local[slices(common, own)].copy_(part[slices(common, box)])

    def full(self) -> dict[str, Tensor]:
        """Return the full tensors of the files, on the CPU. One without shards stays mapped."""
        parts = self._parts.items()
        mapped = {name: cast(Path, shards[0][0]) for name, shards in parts if len(shards) == 1}
        split = self._parts.keys() - mapped.keys()
        tensors = {name: torch.empty(self.shapes[name], dtype=self.dtypes[name]) for name in split}
        self.read(tensors)
        return tensors | {name: open_file(path).get_tensor(name) for name, path in mapped.items()}


def open_file(path: Path) -> Any:
    """Open a safetensors file. A DamagedCheckpointError if it is none; else as `open_regular`."""
    open_regular(path).close()  # raises for a pipe, for which safetensors would wait
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise DamagedCheckpointError(path, f"not a safetensors file ({error})") from error


def load_file(path: str | Path) -> Any:
    """Load a file of torch.save without running code in it, and return its content on the CPU.

    The tensors stay in the file until they are used.

    Raises:
        DamagedCheckpointError: If the file is damaged, no file of torch.save, or contains anything
            but tensors and plain values.
        OSError, UnreadableFileError: If the file cannot be opened.
    """
    open_regular(path).close()  # raises for a pipe, for which torch would wait
    try:
        # torch cannot map a file in the format before torch 1.6.
        return torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # unpickling damaged bytes may raise any exception
        # Do not print torch's message: it advises to load the file without protection.
        refused = re.search(r"GLOBAL (\w\S*\.\w+)", str(error))
        reason = f"contains {refused[1]}" if refused else "damaged, or no file of torch.save"
        raise DamagedCheckpointError(path, f"{reason}; allowed: tensors, plain values") from error

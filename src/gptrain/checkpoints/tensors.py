"""Tensors in safetensors files, each rank's shards in files of its own; and files of torch.save.

The safetensors files have the layout of torch.distributed.checkpoint: its HuggingFaceStorageReader
reads them, and `safetensors` opens the files of one rank directly. torch's own writer is not used,
because it holds all tensors and the full text of the file in memory; here a rank needs the memory
of one tensor. Reading maps the files and copies only what a rank needs.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gptrain.checkpoints.manifest import DamagedCheckpointError
from gptrain.core.small_files import open_regular

MODEL, OPTIMIZER = "model", "optimizer"  # beginnings of the names of the files
SHARDING = "DCP_SHARDING_INFO"  # torch's entry of a file's header
# Name in a file's header -> dtype. torch reads this table of safetensors, too.
DTYPES: dict[Any, torch.dtype] = cast(Any, _TYPES)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Tensors = Mapping[str, Tensor]
Index = tuple[int, ...]  # an index or a size in each dimension


class Shard(NamedTuple):
    """Values that this rank holds of a tensor, and their first index in each dimension."""

    data: Tensor
    offsets: tuple[int, ...]


def shard_of(tensor: Tensor) -> Shard:
    """Return this rank's shard of a DTensor, or a plain tensor as a shard from its beginning."""
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        return Shard(tensor.to_local().detach(), tuple(offsets))
    return Shard(tensor.detach(), (0,) * tensor.ndim)


def encode(shards: Mapping[str, Shard]) -> Iterator[memoryview | bytes]:
    """Yield the content of a safetensors file, one tensor at a time."""
    # Readers need the values of a tensor at a multiple of their size.
    ordered = sorted(shards.items(), key=lambda item: (-item[1].data.element_size(), item[0]))
    offsets = {name: {"saved_offsets": shard.offsets} for name, shard in ordered}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", SHARDING: json.dumps(offsets)}}
    begin = 0
    for name, (data, _) in ordered:
        end = begin + data.nbytes
        shape = list(data.shape)
        header[name] = {"dtype": _NAMES[data.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, (data, _) in ordered:
        yield memoryview(data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


class SavedTensors:
    """Tensors in files or in memory, of which each rank reads its part. No call is collective.

    Args:
        source: Folder of a checkpoint, or of a net of transformers; one safetensors file; or full
            tensors in memory by their names. A folder without such files has no tensors.
        kind: MODEL or OPTIMIZER: which of the files in a folder are read.

    Attributes:
        shapes: Name -> shape of the full tensor.
        dtypes: Name -> dtype. It is empty for tensors in memory.

    Raises:
        DamagedCheckpointError: If a file is no safetensors file, or if files or shards are missing.
        OSError, UnreadableFileError: If a file cannot be opened.
    """

    def __init__(self, source: Path | Tensors, kind: str = MODEL) -> None:
        self.shapes: dict[str, Index] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        # Name -> file or tensor, first index and shape of each shard.
        self._parts: dict[str, list[tuple[Path | Tensor, Index, Index]]] = {}
        if isinstance(source, Mapping):
            for name, tensor in source.items():
                self._add(name, tensor, (0,) * tensor.ndim, tuple(tensor.shape))
            return
        paths = [source] if source.is_file() else sorted(source.glob(f"{kind}*.safetensors"))
        for path in paths:
            number = re.search(r"-of-(\d+)$", path.stem)
            if path != source and len(paths) != int(number[1] if number else 1):
                raise DamagedCheckpointError(source, f"{path.name} is one of {len(paths)} files")
            file = open_file(path)
            try:
                self._add_file(path, file)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise DamagedCheckpointError(path, f"no shards of gptrain ({error})") from error
        for name, parts in self._parts.items():
            if sum(prod(shape) for _, _, shape in parts) != prod(self.shapes[name]):
                raise DamagedCheckpointError(source, f"parts of {name} are missing")

    def _add_file(self, path: Path, file: Any) -> None:
        """Add the shards in an open file."""
        sharding = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
        for name in file.keys():  # noqa: SIM118, it is no mapping
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            begin = tuple(sharding.get(name, {}).get("saved_offsets", (0,) * len(shape)))
            self._add(name, path, begin, shape)
            self.dtypes[name] = DTYPES[part.get_dtype()]

    def _add(self, name: str, values: Path | Tensor, begin: Index, shape: Index) -> None:
        """Add a shard."""
        end = tuple(map(sum, zip(begin, shape, strict=True)))
        self.shapes[name] = tuple(map(max, zip(self.shapes.get(name, end), end, strict=True)))
        self._parts.setdefault(name, []).append((values, begin, shape))

    @torch.no_grad()
    def read(self, tensors: Tensors) -> None:
        """Copy the saved values into these tensors, or this rank's shards of DTensors, by name.

        If the sizes differ, the values at indices that both tensors have are copied. Values of
        another dtype are converted. Raises a KeyError for a name that is not in `shapes`.
        """
        for name, tensor in tensors.items():
            local, begin = shard_of(tensor)
            for values, offsets, shape in self._parts[name]:
                sizes = zip(begin, local.shape, offsets, shape, strict=True)
                bounds = [(max(b, o), min(b + n, o + m)) for b, n, o, m in sizes]
                if all(low < high for low, high in bounds):
                    source, target = (
                        tuple(slice(a - o, z - o) for (a, z), o in zip(bounds, first, strict=True))
                        for first in (offsets, begin)
                    )
                    # Each part opens its file again: an open file keeps the pages that were read
                    # in the memory of the process.
                    is_loaded = isinstance(values, Tensor)
                    part = values if is_loaded else open_file(values).get_slice(name)
                    local[target].copy_(part[source])

    def full(self) -> dict[str, Tensor]:
        """Return the full tensors of the files, on the CPU. One without shards stays mapped."""
        tensors: dict[str, Tensor] = {}
        for name, parts in self._parts.items():
            if len(parts) == 1 and isinstance(path := parts[0][0], Path):
                tensors[name] = open_file(path).get_tensor(name)
            else:
                tensors[name] = torch.empty(self.shapes[name], dtype=self.dtypes[name])
                self.read({name: tensors[name]})
        return tensors


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
        text = f"refused: {reason}; only tensors and plain values are loaded"
        raise DamagedCheckpointError(path, text) from error

"""Tensors in safetensors files, each rank's shards in files of its own.

The files have the layout of torch.distributed.checkpoint: its HuggingFaceStorageReader reads them,
and `safetensors` opens the files of one rank directly. torch's own writer is not used, because it
holds all tensors and the full text of the file in memory; here a rank needs the memory of one
tensor. Reading maps the files and copies only what a rank needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gptrain.checkpoints.manifest import DamagedCheckpointError
from gptrain.core.small_files import open_regular, read_json

MODEL, OPTIMIZER = "model", "optimizer"  # beginnings of the names of the files
INDEX = "model.safetensors.index.json"  # transformers writes it for weights in several files
SHARDING = "DCP_SHARDING_INFO"  # torch's entry of a file's header
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Tensors = Mapping[str, Tensor]


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


def plan_files(
    shards: Mapping[tuple[str, str], Shard], held: list[list[tuple]], rank: int
) -> dict[str, dict[str, Shard]]:
    """Return file name -> name -> shard that this rank writes.

    A shard that several ranks hold is written by the first of them.

    Args:
        shards: MODEL or OPTIMIZER, and name -> shard of this rank.
        held: The keys of `shards` of each rank, with the offsets of the shard.
        rank: Global rank of this process.
    """
    writers: dict[tuple, int] = {}
    for number, keys in enumerate(held):
        for key in keys:
            writers.setdefault(key, number)
    files: dict[str, dict[str, Shard]] = {}
    for kind in (MODEL, OPTIMIZER):
        ranks = sorted({number for key, number in writers.items() if key[0] == kind})
        own = {
            key[1]: shard
            for key, shard in shards.items()
            if key[0] == kind and writers[(*key, shard.offsets)] == rank
        }
        if own:
            part = f"-{ranks.index(rank) + 1:05d}-of-{len(ranks):05d}" if len(ranks) > 1 else ""
            files[f"{kind}{part}.safetensors"] = own
    return files


def encode(shards: Mapping[str, Shard]) -> Iterator[memoryview | bytes]:
    """Yield the content of a safetensors file, one tensor at a time."""
    # Readers need the values of a tensor at a multiple of their size.
    ordered = sorted(shards.items(), key=lambda item: (-item[1].data.element_size(), item[0]))
    offsets = {name: {"saved_offsets": shard.offsets} for name, shard in ordered}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", SHARDING: json.dumps(offsets)}}
    begin = 0
    for name, (data, _) in ordered:
        if data.dtype not in _NAMES:
            raise TypeError(f"{name}: safetensors has no {data.dtype}")
        end = begin + data.nbytes
        shape = list(data.shape)
        header[name] = {"dtype": _NAMES[data.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, (data, _) in ordered:
        yield memoryview(data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


class Part(NamedTuple):
    """A shard in a file."""

    path: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class SavedTensors:
    """Full tensors in the safetensors files of a checkpoint, of which each rank reads its part.

    Args:
        folder: Folder of a checkpoint.
        kind: MODEL or OPTIMIZER.

    Attributes:
        shapes: Name -> shape of the full tensor.
        dtypes: Name -> dtype.

    Raises:
        DamagedCheckpointError: If a file is no safetensors file, or if shards are missing.
    """

    def __init__(self, folder: Path, kind: str = MODEL) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[str, list[Part]] = {}
        for path in sorted(folder.glob(f"{kind}*.safetensors")):
            with open_file(path) as file:
                try:
                    self._add(path, file)
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    raise DamagedCheckpointError(path, f"no shards of gptrain ({error})") from error
        for name, parts in self._parts.items():
            if sum(prod(part.shape) for part in parts) != prod(self.shapes[name]):
                raise DamagedCheckpointError(folder, f"parts of {name} are missing")

    def _add(self, path: Path, file: Any) -> None:
        """Add the shards of an open file."""
        sharding = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
        for name in file.keys():  # noqa: SIM118, it is no mapping
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            begin = tuple(sharding.get(name, {}).get("saved_offsets", (0,) * len(shape)))
            end = tuple(map(sum, zip(begin, shape, strict=True)))
            known = self.shapes.get(name, end)
            self.shapes[name] = tuple(map(max, zip(known, end, strict=True)))
            self.dtypes[name] = DTYPES[part.get_dtype()]
            self._parts.setdefault(name, []).append(Part(path, begin, shape))

    @torch.no_grad()
    def read(self, tensors: Tensors) -> None:
        """Copy the saved values into the tensors or shards of this rank, by their names.

        Raises:
            DamagedCheckpointError: If a file is no safetensors file.
            FileNotFoundError: If a file is missing.
        """
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for name, tensor in tensors.items():
                local, begin = shard_of(tensor)
                for path, offsets, shape in self._parts[name]:
                    sizes = zip(begin, local.shape, offsets, shape, strict=True)
                    bounds = [(max(b, o), min(b + n, o + m)) for b, n, o, m in sizes]
                    if any(low >= high for low, high in bounds):
                        continue
                    if path not in files:
                        files[path] = stack.enter_context(open_file(path))
                    source = [
                        slice(a - o, z - o) for (a, z), o in zip(bounds, offsets, strict=True)
                    ]
                    target = [slice(a - b, z - b) for (a, z), b in zip(bounds, begin, strict=True)]
                    local[tuple(target)].copy_(files[path].get_slice(name)[tuple(source)])

    def full(self) -> dict[str, Tensor]:
        """Return all tensors in full, on the CPU. Those of one rank stay in their files, mapped."""
        tensors: dict[str, Tensor] = {}
        for name, parts in self._parts.items():
            if len(parts) == 1:
                with open_file(parts[0].path) as file:
                    tensors[name] = file.get_tensor(name)
            else:
                tensors[name] = torch.empty(self.shapes[name], dtype=self.dtypes[name])
                self.read({name: tensors[name]})
        return tensors


def open_file(path: Path) -> Any:
    """Open a safetensors file.

    Raises:
        DamagedCheckpointError: If it is none.
        FileNotFoundError: If it is missing.
    """
    open_regular(path).close()  # raises for a pipe, for which safetensors would wait
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise DamagedCheckpointError(path, f"not a safetensors file ({error})") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or all files that an index names, by memory mapping.

    Args:
        path: File. One of the name model.safetensors.index.json is an index.

    Raises:
        OSError: If the file is missing or cannot be read.
        DamagedCheckpointError: If a file is not a safetensors file, or an index is damaged.
        UnreadableFileError: If the path is not a regular file, or an index is no JSON.
    """
    if path.name == INDEX:
        return {k: v for part in _indexed(path) for k, v in read_safetensors(part).items()}
    with open_file(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _indexed(index: Path) -> list[Path]:
    """Return the safetensors files that an index names, sorted by name.

    Args:
        index: Path of a model.safetensors.index.json.

    Raises:
        DamagedCheckpointError: If the file is no index, or if it names a file that does not exist,
            is not in the same folder or is not of the type .safetensors.
        UnreadableFileError: If the file is no JSON.
    """
    content: Any = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        message = "not an index of safetensors files: it has no weight_map"
        raise DamagedCheckpointError(index, message)
    parts = sorted(set(map(str, names.values())))
    for name in parts:
        is_in_folder = Path(name).name == name and (index.parent / name).is_file()
        if not is_in_folder or not name.endswith(".safetensors"):  # another index is refused, too
            message = f"names {name}, which is not a safetensors file in the same folder"
            raise DamagedCheckpointError(index, message)
    return [index.parent / name for name in parts]

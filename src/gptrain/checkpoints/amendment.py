"""The file that is added to a checkpoint after the validation of its step.

A step is saved before its validation, so that a validation that fails costs no training. The
validation changes counters, metrics and states of callbacks, but hardly any tensor, and the tensors
are nearly all of the bytes. The file `NAME` holds the state after the validation, in which
`UNCHANGED` stands for every tensor that did not change. `load_state` merges the two files.
"""

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gptrain.checkpoints.manifest import STATE_NAME, read_manifest
from gptrain.checkpoints.safe_load import load_file

NAME = "validated.ckpt"
UNCHANGED = "unchanged tensor of state.ckpt"
Fingerprint = tuple[tuple[int, ...], torch.dtype, Tensor]
Fingerprints = dict[tuple[Any, ...], Fingerprint]
_PIECE = 1 << 22  # elements per sum; it bounds the memory that a sum needs
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(state: Any) -> Fingerprints:
    """Return the fingerprint of every tensor in nested dicts, lists and tuples, by its path.

    A path is the tuple of keys and indices that leads to the tensor. A fingerprint is the shape,
    the dtype and, for each piece of the tensor, the exact sum of its bits read as integers. It is
    computed on the tensor's device, by one read of the tensor. A DTensor's local shard counts.

    Args:
        state: Nested dicts, lists and tuples. Values that are no tensors are ignored.
    """
    prints: Fingerprints = {}

    def add(path: tuple[Any, ...], tensor: Tensor) -> None:
        prints[path] = _fingerprint(tensor)

    _map_tensors(state, add)
    return prints


def amend(state: Any, before: Fingerprints) -> bytes:
    """Return the bytes of a file that holds a state without its unchanged tensors.

    `torch.save` makes the file. The text UNCHANGED stands in place of each unchanged tensor.

    Args:
        state: Nested dicts, lists and tuples after the validation.
        before: Fingerprints of the state in state.ckpt.
    """

    def replace_unchanged(path: tuple[Any, ...], tensor: Tensor) -> Tensor | str:
        is_same = path in before and _is_same(_fingerprint(tensor), before[path])
        return UNCHANGED if is_same else tensor

    file = io.BytesIO()
    torch.save(_map_tensors(state, replace_unchanged), file)
    return file.getvalue()


def is_unchanged(state: Any, before: Fingerprints) -> bool:
    """Return whether a state has the same tensors as before, with the same values.

    Args:
        state: Nested dicts, lists and tuples. Values that are no tensors are ignored.
        before: Fingerprints of the earlier state.
    """
    now = fingerprints(state)
    return now.keys() == before.keys() and all(_is_same(now[path], before[path]) for path in now)


def load_state(folder: Path, *, mmap: bool = False) -> Any:
    """Return the state in a checkpoint's folder: the one after the validation if it was saved.

    Does not verify the hashes of the files: call `manifest.verify` before.

    Args:
        folder: Folder of a checkpoint.
        mmap: Whether the tensors of state.ckpt stay in the file until they are used.

    Raises:
        DamagedCheckpointError: If a file or the manifest is damaged.
        UnsafeCheckpointError: If a file would run code when it is loaded.
        FileNotFoundError: If a file of the state is missing.
    """
    state = load_file(folder / STATE_NAME, mmap=mmap)
    if NAME in read_manifest(folder)["files"]:
        state = _merge(state, load_file(folder / NAME))
    return state


def _merge(state: Any, amended: Any) -> Any:
    """Return the state after the validation, complete with its unchanged tensors.

    Args:
        state: State in state.ckpt, with all tensors.
        amended: State after the validation, with UNCHANGED in place of unchanged tensors.
    """
    if isinstance(amended, str) and amended == UNCHANGED:
        return state
    if isinstance(amended, Mapping):
        old = state if isinstance(state, Mapping) else {}
        return {key: _merge(old.get(key), value) for key, value in amended.items()}
    if type(amended) in (list, tuple):
        old = state if isinstance(state, list | tuple) and len(state) == len(amended) else amended
        return type(amended)(_merge(*pair) for pair in zip(old, amended, strict=True))
    return amended


def _map_tensors(
    tree: Any, function: Callable[[tuple[Any, ...], Tensor], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Return nested dicts, lists and tuples with function(path, tensor) in place of each tensor.

    Args:
        tree: Nested dicts, lists and tuples. Other values are kept.
        function: Function of the path and the tensor.
        path: Keys and indices that lead to `tree` itself.
    """
    if isinstance(tree, Tensor):
        return function(path, tree)
    if isinstance(tree, Mapping):
        return {k: _map_tensors(value, function, (*path, k)) for k, value in tree.items()}
    if type(tree) in (list, tuple):
        items = (_map_tensors(value, function, (*path, i)) for i, value in enumerate(tree))
        return type(tree)(items)
    return tree


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Return the shape, the dtype and the sums of the bits of a tensor or of its local shard."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    flat = local.reshape(-1)
    if flat.element_size() not in _INTEGERS:  # complex128 has 16 bytes per element
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    sums = [piece.sum() for piece in flat.split(_PIECE)] if math.prod(local.shape) else []
    return tuple(local.shape), local.dtype, torch.stack(sums) if sums else flat


def _is_same(first: Fingerprint, second: Fingerprint) -> bool:
    """Return whether two fingerprints are equal, also if they are on different devices."""
    return first[:2] == second[:2] and torch.equal(first[2].cpu(), second[2].cpu())

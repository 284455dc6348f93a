"""What a validation adds to a checkpoint that was saved before it: one small file more.

A step is saved before its validation, so that a validation that fails costs nothing. Afterwards
the same step's counters, metrics and states of callbacks are others, and its tensors, nearly all of
the bytes, are the same. `NAME` holds the state after the validation, in which every
tensor that did not change is replaced by `UNCHANGED`. `load_state` puts the two files together.
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
_PIECE = 1 << 22  # elements that are summed at once: bounds the memory of the sum
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(state: Any) -> Fingerprints:
    """Return path -> fingerprint of every tensor in nested dicts, lists and tuples.

    A fingerprint is the shape, the dtype and, for each piece of the tensor, the exact sum of its
    bits read as integers. It costs one read of the tensor on its own device.
    """
    found: Fingerprints = {}

    def note(path: tuple[Any, ...], tensor: Tensor) -> None:
        found[path] = _fingerprint(tensor)

    _map_tensors(state, note)
    return found


def amend(state: Any, before: Fingerprints) -> bytes:
    """Return the file of a state in which UNCHANGED stands for every tensor that is as before."""

    def shorten(path: tuple[Any, ...], tensor: Tensor) -> Tensor | str:
        is_same = path in before and _is_same(_fingerprint(tensor), before[path])
        return UNCHANGED if is_same else tensor

    file = io.BytesIO()
    torch.save(_map_tensors(state, shorten), file)
    return file.getvalue()


def is_unchanged(state: Any, before: Fingerprints) -> bool:
    """Whether the state has the same tensors as before, with the same values."""
    now = fingerprints(state)
    return now.keys() == before.keys() and all(_is_same(now[path], before[path]) for path in now)


def load_state(folder: Path, *, mmap: bool = False) -> Any:
    """Return the state of a checkpoint's folder, after its validation if that was done.

    Raises: as `load_file` and `read_manifest`.
    """
    state = load_file(folder / STATE_NAME, mmap=mmap)
    if NAME in read_manifest(folder)["files"]:
        state = _merge(state, load_file(folder / NAME))
    return state


def _merge(state: Any, amended: Any) -> Any:
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
    """Return the tree with function(path, tensor) in place of each tensor."""
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
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    flat = local.reshape(-1)
    if flat.element_size() not in _INTEGERS:  # complex128
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    sums = [piece.sum() for piece in flat.split(_PIECE)] if math.prod(local.shape) else []
    return tuple(local.shape), local.dtype, torch.stack(sums) if sums else flat


def _is_same(one: Fingerprint, other: Fingerprint) -> bool:
    return one[:2] == other[:2] and torch.equal(one[2].cpu(), other[2].cpu())

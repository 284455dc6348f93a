"""The small file that is added to a checkpoint after the validation of its step.

A step is saved before its validation, so that a validation that fails costs no training. The
validation changes counters, metrics and states of callbacks, but hardly any tensor, and the tensors
are nearly all of the bytes. The file `NAME` holds the state after the validation, in which the text
`UNCHANGED` stands for every tensor that did not change. `load_state` merges the two files. To find
out which tensors have changed without a second copy of them, fingerprints are compared.
"""

import io
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
    """Return a fingerprint of every tensor in nested dicts, lists and tuples, to detect changes.

    The result maps the path of a tensor, the tuple of keys and indices that leads to it, to its
    fingerprint: the shape, the dtype and, for each piece of the tensor, a weighted sum of its bits
    read as integers. It is computed on the tensor's device, by one read of the tensor. Of a
    DTensor, the local shard counts.

    Args:
        state: Nested dicts, lists and tuples. Values that are no tensors are ignored.
    """
    prints: Fingerprints = {}

    def add(path: tuple[Any, ...], tensor: Tensor) -> None:
        prints[path] = _fingerprint(tensor)

    _map_tensors(state, add)
    return prints


def amend(state: Any, before: Fingerprints) -> bytes:
    """Return the content of validated.ckpt: the state of a run after the validation of a step.

    The file is added to the checkpoint of the step, which was saved before the validation. A marker
    text (UNCHANGED) replaces each tensor that has not changed since then. torch.save makes the
    file.

    Args:
        state: Nested dicts, lists and tuples after the validation.
        before: Fingerprints of the state that was saved in state.ckpt.
    """

    def replace_unchanged(path: tuple[Any, ...], tensor: Tensor) -> Tensor | str:
        is_same = path in before and _is_same(_fingerprint(tensor), before[path])
        return UNCHANGED if is_same else tensor

    file = io.BytesIO()
    torch.save(_map_tensors(state, replace_unchanged), file)
    return file.getvalue()


def is_unchanged(state: Any, before: Fingerprints) -> bool:
    """Return whether a state has the same tensors as before, with the same values.

    A change that leaves the weighted sum of the bits equal is not noticed.

    Args:
        state: Nested dicts, lists and tuples. Values that are no tensors are ignored.
        before: Fingerprints of the earlier state.
    """
    now = fingerprints(state)
    return now.keys() == before.keys() and all(_is_same(now[path], before[path]) for path in now)


def load_state(folder: Path, *, mmap: bool = False) -> Any:
    """Return the state of rank 0 in a checkpoint: that of state.ckpt, merged with validated.ckpt.

    validated.ckpt has the changes by the validation of the step. A checkpoint without this file
    gives the state of state.ckpt. Does not verify the hashes of the files: call `manifest.verify`
    before.

    Args:
        folder: Folder of a checkpoint.
        mmap: Whether the tensors of state.ckpt stay in the file until they are used.

    Raises:
        DamagedCheckpointError: If a file is damaged, or the manifest is missing or damaged.
        UnsafeCheckpointError: If a file contains anything but tensors and plain values.
        FileNotFoundError: If a file of the state is missing.
        OSError: If the network file system does not answer.
    """
    state = load_file(folder / STATE_NAME, mmap=mmap)
    if NAME in read_manifest(folder)["files"]:
        state = _merge(state, load_file(folder / NAME))
    return state


def _merge(state: Any, amended: Any) -> Any:
    """Return the state after the validation, with the saved tensors in place of UNCHANGED.

    Args:
        state: State that was saved in state.ckpt, with all tensors.
        amended: State after the validation, with the text UNCHANGED in place of unchanged tensors.
    """
    if isinstance(amended, str) and amended == UNCHANGED:
        return state
    if isinstance(amended, Mapping):
        old = state if isinstance(state, Mapping) else {}
        return {key: _merge(old.get(key), value) for key, value in amended.items()}
    if type(amended) in (list, tuple):
        # The validation may have made the list longer.
        old = [*(state if isinstance(state, list | tuple) else ()), *[None] * len(amended)]
        return type(amended)(_merge(*pair) for pair in zip(old, amended, strict=False))
    return amended


def _map_tensors(
    tree: Any, function: Callable[[tuple[Any, ...], Tensor], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Return nested dicts, lists and tuples with function(path, tensor) in place of each tensor.

    Args:
        tree: Nested dicts, lists and tuples. Other values are kept as they are, also named tuples
            and other subclasses of list and tuple with all that they hold.
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
    """Return the fingerprint of a tensor, or of the local shard of a DTensor.

    It is the shape, the dtype and, for each piece, a sum of the bits, read as integers. Odd weights
    make it depend on the place of each element: a drawn number moves a count within the state of
    the random generator, which leaves the plain sum equal.
    """
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    flat = local.reshape(-1)
    if flat.element_size() not in _INTEGERS:  # complex128 has 16 bytes per element
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    weights = 2 * torch.arange(min(len(flat), _PIECE), device=flat.device) + 1
    sums = [(piece * weights[: len(piece)]).sum() for piece in flat.split(_PIECE)]
    return tuple(local.shape), local.dtype, torch.stack(sums)


def _is_same(first: Fingerprint, second: Fingerprint) -> bool:
    """Return whether two fingerprints are equal, also if they are on different devices."""
    return first[:2] == second[:2] and torch.equal(first[2].cpu(), second[2].cpu())

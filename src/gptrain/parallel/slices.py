"""From the whole to this rank's slice of it, and back: the one place that knows how cuts are made.

Cuts are torch.chunk's: all ranks hold the same number of rows but the last ones, who hold less. On
two axes the innermost cuts first: FSDP (outer) shards what tensor parallelism (inner) left.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from gptrain.parallel.sequence import all_gather_single


def slice_of(
    whole: Tensor, placements: Sequence[Placement], coordinate: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """View of the part of whole that the rank at coordinate holds."""
    for placement, index, size in reversed(list(zip(placements, coordinate, sizes, strict=True))):
        if isinstance(placement, Replicate):
            continue
        length = whole.shape[placement.dim]
        rows = -(-length // size)
        start = min(index * rows, length)
        whole = whole.narrow(placement.dim, start, min(rows, length - start))
    return whole


@torch.no_grad()
def copy_slice(target: Tensor, whole: Tensor) -> None:
    """Copy whole into a plain tensor, or this rank's slice of it into a DTensor; no communication.

    Raises: ValueError if the shapes differ.
    """
    if target.shape != whole.shape:
        raise ValueError(f"shapes differ: {tuple(target.shape)} here, {tuple(whole.shape)} given")
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        whole = slice_of(whole, target.placements, mesh.get_coordinate(), mesh.shape)
        target = target.to_local()
    target.copy_(whole)


def like_parameter(value: Any, parameter: Tensor) -> Any:
    """This rank's slice of a whole tensor of the parameter's shape; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device, copy=True)
    mesh, placements = parameter.device_mesh, parameter.placements
    local = slice_of(value, placements, mesh.get_coordinate(), mesh.shape)
    local = local.to(parameter.to_local().device, copy=True)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank; a plain tensor as it is. Collective.

    slice_of undone: DTensor's own way cannot undo uneven cuts of one dimension by two axes.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, whole = tensor.device_mesh, tensor.to_local()
    # Lengths before each cut, innermost axis first, as slice_of cuts; undone outermost first.
    cuts, left = [], torch.empty(tensor.shape, device="meta")
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if not placement.is_replicate():
            cuts.append((axis, placement.dim, left.shape[placement.dim]))
            here = [mesh.get_coordinate()[axis]], [mesh.shape[axis]]
            left = slice_of(left, [placement], *here)
    for axis, dim, length in reversed(cuts):
        size = mesh.shape[axis]
        rows = -(-length // size)
        part = whole.movedim(dim, 0)
        part = F.pad(part, (0, 0) * (part.ndim - 1) + (0, rows - part.shape[0])).contiguous()
        gathered = part.new_empty(size * rows, *part.shape[1:])
        all_gather_single(gathered, part, group=mesh.get_group(axis))
        whole = gathered[:length].movedim(0, dim)
    return whole

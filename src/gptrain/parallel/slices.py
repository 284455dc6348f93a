"""Whole tensors and the slices that ranks hold: to slice, to fill, to gather.

The one place that knows the layout. Slices are torch.chunk's: all ranks hold the same number of
rows, the last ones fewer or none. On two axes the innermost slices first: FSDP (outer) shards what
tensor parallelism (inner) left.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from gptrain.parallel.fit import tied_names
from gptrain.parallel.mesh import all_gather_single


def build_partitioned(
    make_net: Callable[[], nn.Module],
    partition: Callable[[nn.Module], None],
    device: torch.device | str,
) -> nn.Module:
    """Net made by make_net, partitioned in place by partition(net), with weights on device.

    A net with `init_parameter` and without buffers is made and partitioned on the meta device and
    filled one parameter at a time: a rank never holds more than its slices and one whole parameter.
    Any other net is made whole on the CPU, then partitioned.
    Both draw from the global CPU generator what one call of make_net draws, so the same seed gives
    the weights of a single process.
    """
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        net = make_net()
    if not hasattr(net, "init_parameter") or any(True for _ in net.buffers()):
        torch.random.set_rng_state(before)
        net = make_net()
        partition(net)
        return net.to(device)
    first_name = tied_names(net)  # also of a weight whose first name this rank does not hold
    partition(net)
    net.to_empty(device=device)
    for name, parameter in net.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        net.init_parameter(first_name.get(name, name), whole)
        copy_slice(parameter, whole)
    return net


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
    mine = torch.empty_like(parameter.detach(), dtype=value.dtype)
    copy_slice(mine, value)
    return mine


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank; a plain tensor as it is. Collective.

    The inverse of slice_of. DTensor's own full_tensor() fails where two axes slice one dimension
    unevenly.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, whole = tensor.device_mesh, tensor.to_local()
    # Lengths before each slicing, innermost axis first, as in slice_of; undone outermost first.
    slicings, left = [], torch.empty(tensor.shape, device="meta")
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if not placement.is_replicate():
            slicings.append((axis, placement.dim, left.shape[placement.dim]))
            here = [mesh.get_coordinate()[axis]], [mesh.shape[axis]]
            left = slice_of(left, [placement], *here)
    for axis, dim, length in reversed(slicings):
        size = mesh.shape[axis]
        rows = -(-length // size)
        part = whole.movedim(dim, 0)
        part = F.pad(part, (0, 0) * (part.ndim - 1) + (0, rows - part.shape[0])).contiguous()
        gathered = part.new_empty(size * rows, *part.shape[1:])
        all_gather_single(gathered, part, group=mesh.get_group(axis))
        whole = gathered[:length].movedim(0, dim)
    return whole

"""Sums of gradients over groups of ranks, the global gradient norm, and clipping."""

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gptrain.parallel.placement import local_shard
from gptrain.parallel.requirements import IncompatibleModelError


@torch.no_grad()
def sum_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, divisor: int = 1
) -> None:
    """Replace each gradient, in place, by its sum over a group of ranks, divided by `divisor`.

    Collective. Parameters without a gradient are left out. All ranks must have the same gradients
    in the same order (`check_use`). With a group of one rank nothing is changed.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if group.size() == 1 or not gradients:
        return
    device = _communication_device(gradients[0])
    vectors = [local_shard(gradient) for gradient in gradients if gradient.ndim < 2]
    matrices = [[local_shard(gradient)] for gradient in gradients if gradient.ndim >= 2]
    for message in filter(None, (vectors, *matrices)):
        flat = torch.cat([part.flatten() for part in message]).to(device)
        dist.all_reduce(flat, group=group)
        flat /= divisor
        for part, summed in zip(message, flat.split([p.numel() for p in message]), strict=True):
            part.copy_(summed.view_as(part))


@torch.no_grad()
def check_use(
    is_used: Mapping[nn.Parameter, bool], group: dist.ProcessGroup, finds_unused: bool
) -> None:
    """Make the ranks of a group agree on which parameters have a gradient in this step. Collective.

    A parameter without a gradient that other ranks use gets a gradient of zeros. A parameter that
    no rank uses gets None.

    Args:
        is_used: Parameter -> whether this rank has computed a gradient. All ranks pass the same
            parameters, at least one, in the same order.
        group: Ranks that must agree.
        finds_unused: Value of `strategy.find_unused_parameters`.

    Raises:
        IncompatibleModelError: On a rank that lacks a gradient that others have, if `finds_unused`
            is False.
    """
    parameters = list(is_used)
    unused = [index for index, parameter in enumerate(parameters) if not is_used[parameter]]
    counts = torch.ones(len(parameters), device=_communication_device(parameters[0]))
    counts[unused] = 0
    dist.all_reduce(counts, group=group)
    for index, count in zip(unused, counts[unused].tolist() if unused else (), strict=True):
        parameter = parameters[index]
        if not count:
            parameter.grad = None
        elif not finds_unused:
            key, shape = "strategy.find_unused_parameters", tuple(parameter.shape)
            message = f"rank {dist.get_rank()} has no gradient of a parameter of shape {shape} in "
            raise IncompatibleModelError(key, f"{message}this step, others have; try: {key}=true")
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@torch.no_grad()
def clip_grad_norm(
    parameters: list[nn.Parameter],
    max_norm: float | None,
    stages: dist.ProcessGroup | None = None,
    counted_on_other_stage: Set[nn.Parameter] = frozenset(),
) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`. Collective.

    All ranks of the mesh and of `stages` must call it. The host does not wait for the device.

    Args:
        parameters: Parameters of this rank. Those without a gradient are left out. All DTensors
            must have the same mesh.
        max_norm: Largest norm. None or 0 changes no gradient.
        stages: Ranks of the pipeline, each with its own parameters. None without a pipeline.
        counted_on_other_stage: Parameters that several stages hold, and that another rank counts in
            the norm.

    Returns:
        The L2 norm of all gradients of all ranks before, a scalar tensor, the same on all ranks. It
        is in fp64 if a parameter is, else in fp32.
    """
    # All ranks must all-reduce one dtype, also a rank on which no parameter has a gradient.
    is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    dtype = torch.float64 if is_double else torch.float32
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    shards = [local_shard(gradient) for gradient in gradients.values()]
    mesh = next((g.device_mesh for g in gradients.values() if isinstance(g, DTensor)), None)
    axes = mesh.get_all_groups() if mesh is not None else []
    counted = [
        local_shard(gradient)
        for p, gradient in gradients.items()
        if p not in counted_on_other_stage and _is_counted_on_this_rank(gradient, axes)
    ]
    device = mesh.device_type if mesh is not None else shards[0].device if shards else None
    squares = torch.zeros((), dtype=dtype, device=device)
    for alike in _by_device(counted):
        norms = torch.stack(torch._foreach_norm(alike, 2, dtype=dtype))
        squares += norms.square().sum().to(squares.device)
    for group in (*axes, stages):
        if group is not None and group.size() > 1:
            dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if max_norm:
        # torch.nn.utils.clip_grad_norm_ adds 1e-6, too: the results are bitwise equal.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for alike in _by_device(shards):
            torch._foreach_mul_(alike, factor.to(alike[0].device))
    return norm


def _by_device(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the tensors in one list for each device, as torch's `_foreach` functions need them."""
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups.values()


def _communication_device(tensor: Tensor) -> torch.device | str:
    """Return the device on which ranks exchange a tensor, of which shards may be on the CPU."""
    return tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device


def _is_counted_on_this_rank(gradient: Tensor, axes: Sequence[dist.ProcessGroup]) -> bool:
    """Return whether this rank is the first of those that hold the same values of a gradient."""
    if not isinstance(gradient, DTensor):
        return all(axis.rank() == 0 for axis in axes)
    coordinates = gradient.device_mesh.get_coordinate() or ()
    places = zip(coordinates, gradient.placements, strict=True)
    return all(index == 0 for index, placement in places if placement.is_replicate())

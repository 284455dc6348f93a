"""Sums of gradients over groups of ranks, and their global norm with clipping."""

import math
from collections.abc import Iterable, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gptrain.parallel.placement import local_shard


@torch.no_grad()
def sum_gradients(
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup,
    divisor: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """Replace each gradient by the group's sum, divided by divisor; all vectors in one message.

    Called once per optimizer step. All ranks of the group pass the same parameters in one order.

    Args:
        dtype: in which they are sent; None: their own.
    """
    if group.size() == 1:
        return
    given = [p.grad for p in parameters if p.grad is not None]
    vectors = [local_shard(gradient) for gradient in given if gradient.ndim < 2]
    messages = [vectors] if vectors else []
    messages += [[local_shard(gradient)] for gradient in given if gradient.ndim >= 2]
    for message in messages:
        flat = torch.cat([part.flatten() for part in message]).to(_wire(given), dtype)
        dist.all_reduce(flat, group=group)
        if divisor != 1:
            flat /= divisor
        for part, summed in zip(message, flat.split([p.numel() for p in message]), strict=True):
            part.copy_(summed.view_as(part))


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    *,
    scale: Tensor | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
    elsewhere: Set[nn.Parameter] = frozenset(),
) -> Tensor:
    """Norm of all gradients of the whole net, alike on all ranks; scaled down to max_norm in place.

    norm^2 = sum over ranks of |local gradient|^2, where of several ranks that hold the same values
    the first one counts them; so a mesh costs one number per axis. Nothing is read on the host.
    Gradients are measured in fp32, of fp64 in theirs.

    Args:
        max_norm: None or 0 measures only.
        scale: what the gradients are multiplied by before all else; None: by nothing.
        groups: further groups over which the net is split (the stages of a pipeline).
        elsewhere: parameters that another rank of these groups counts (tied weights).
    """
    given = [(p, p.grad) for p in parameters if p.grad is not None]
    gradients = [local_shard(gradient) for _, gradient in given]
    mesh = next((grad.device_mesh for _, grad in given if isinstance(grad, DTensor)), None)
    axes = mesh.get_all_groups() if mesh is not None else []
    counted = [
        local
        for (p, gradient), local in zip(given, gradients, strict=True)
        if p not in elsewhere and _counts_here(gradient, axes)
    ]
    squares = torch.zeros((), device=_wire([gradient for _, gradient in given]))
    if counted:
        is_double = any(gradient.dtype == torch.float64 for gradient in counted)
        dtype = torch.float64 if is_double else torch.float32
        norms = torch.stack(torch._foreach_norm(counted, 2, dtype=dtype))
        squares += norms.square().sum().to(squares.device)
    for group in (*axes, *groups):
        if group.size() > 1:
            dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if not gradients:
        return norm
    norm, factors = norm.to(gradients[0].device), []
    if scale is not None:
        factors.append(scale.to(norm))
        norm = norm * factors[0]
    if max_norm:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_, so that both give the same bits.
        factors.append((max_norm / (norm + 1e-6)).clamp(max=1.0))
    if factors:
        torch._foreach_mul_(gradients, math.prod(factors))
    return norm


def _wire(gradients: Sequence[Tensor]) -> torch.device | str | None:
    # Offloaded gradients lie on the CPU, which the collectives of their mesh of GPUs do not read.
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            return gradient.device_mesh.device_type
    return gradients[0].device if gradients else None


def _counts_here(gradient: Tensor, axes: Sequence[dist.ProcessGroup]) -> bool:
    if not isinstance(gradient, DTensor):
        return all(axis.rank() == 0 for axis in axes)
    places = zip(gradient.device_mesh.get_coordinate() or (), gradient.placements, strict=True)
    return all(index == 0 for index, placement in places if placement.is_replicate())

"""Sums of gradients over groups of ranks, and their global norm with clipping."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

# Coalesced messages: large enough that latency is nothing, small enough to be no second copy of
# the gradients. DistributedDataParallel's own default.
BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def sum_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, divisor: int = 1
) -> None:
    """Replace each gradient by the group's sum, divided by divisor; many in one message.

    Called once per optimizer step, after the last micro-step: sums commute with accumulation.
    All ranks of the group must pass the same parameters in the same order.
    """
    if group.size() == 1:
        return
    given = [p.grad for p in parameters if p.grad is not None]
    for bucket in _buckets([_local(gradient) for gradient in given]):
        flat = torch.cat([gradient.flatten() for gradient in bucket]).to(_reducing_device(given))
        dist.all_reduce(flat, group=group)
        if divisor != 1:
            flat /= divisor
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    copies: Mapping[nn.Parameter, int] | None = None,
) -> Tensor:
    """Norm of all gradients of the whole net, alike on all ranks; scaled down to max_norm in place.

    norm^2 = sum over ranks of |local gradient|^2 / (ranks that hold the same values), so what is
    replicated counts once, what is split counts in parts, and a mesh costs one number per axis.
    Nothing is read on the host. Gradients are measured in fp32.

    Args:
        max_norm: None measures only.
        groups: further groups over which the net is split (the stages of a pipeline).
        copies: parameters of which these groups hold copies (tied weights), and how many.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    gradients = [_local(p.grad) for p in with_gradient]
    meshes = {p.grad.device_mesh: None for p in with_gradient if isinstance(p.grad, DTensor)}
    axes = list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()))
    by_copies: dict[int, list[Tensor]] = {}
    for parameter, gradient in zip(with_gradient, gradients, strict=True):
        n_copies = _n_copies(parameter.grad, axes) * (copies or {}).get(parameter, 1)
        by_copies.setdefault(n_copies, []).append(gradient)
    squares = torch.zeros((), device=gradients[0].device if gradients else None)
    for n_copies, alike in by_copies.items():
        norms = torch.stack(torch._foreach_norm(alike, 2, dtype=torch.float32))
        squares += norms.square().sum() / n_copies
    home = squares.device
    squares = squares.to(_reducing_device([p.grad for p in with_gradient]))
    for group in (*axes, *groups):
        if group.size() > 1:
            dist.all_reduce(squares, group=group)
    norm = squares.sqrt().to(home)
    if max_norm is not None and gradients:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_, so that both give the same bits.
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _reducing_device(gradients: Sequence[Tensor]) -> torch.device | str | None:
    # Offloaded gradients lie on the CPU, which the collectives of their mesh of GPUs do not read.
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            return gradient.device_mesh.device_type
    return gradients[0].device if gradients else None


def _n_copies(gradient: Tensor, axes: Sequence[dist.ProcessGroup]) -> int:
    # How many ranks of the meshes hold the same values: all but along axes that split them.
    n = prod(axis.size() for axis in axes)
    if isinstance(gradient, DTensor):
        sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
        n //= prod(size for size, placement in sizes if not isinstance(placement, Replicate))
    return n


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for gradient in gradients:
        n_bytes = sum(g.nbytes for g in bucket) + gradient.nbytes
        if bucket and (n_bytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket

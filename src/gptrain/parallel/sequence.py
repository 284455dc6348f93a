"""Collectives along the sequence and the vocabulary, with their gradients.

The pair of Korthikanti et al. 2022 (arXiv:2205.05198): where activations go from sequence slices to
the whole, forward gathers and backward reduce-scatters; where partial sums go to slices, the
reverse. Each sends (n-1)/n of the whole tensor per rank, half of an all-reduce.
All slices are equally long: the sequence is padded at its end, which a causal net cannot see.
"""

# T' time padded to a multiple of n ranks, t = T' / n

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Renamed in torch 2.13, which warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Slices (..., t, D) of all ranks side by side, (..., T', D). Backward sums over ranks."""
    return _GatherSequence.apply(part, group)


def scatter_sequence(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice (..., t, D) of the sum over ranks of (..., T', D). Backward gathers."""
    return _ScatterSequence.apply(partial, group)


def gather_vocabulary(part: Tensor, n_columns: int, group: dist.ProcessGroup) -> Tensor:
    """Columns of all ranks, (..., n_columns), where ranks hold torch.chunk's parts of them.

    Backward takes this rank's columns: what follows is computed alike on every rank.
    """
    return _GatherVocabulary.apply(part, n_columns, group)


def pad_to_multiple(tokens: Tensor, n: int) -> Tensor:
    """Indices (..., T) padded with index 0 to (..., T')."""
    return F.pad(tokens, (0, -tokens.shape[-1] % n))


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return _all_gather(part, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return _reduce_scatter(partial, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.group), None


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, n_columns, group):
        width = -(-n_columns // group.size())  # torch.chunk's; the last ranks' parts are padded
        ctx.start, ctx.width = group.rank() * width, part.shape[-1]
        part = F.pad(part, (0, width - part.shape[-1])).contiguous()
        whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        all_gather_single(whole, part, group=group)
        whole = whole.unflatten(0, (group.size(), -1))  # (n, B, T', width)
        return whole.movedim(0, -2).flatten(-2)[..., :n_columns]

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(-1, min(ctx.start, grad.shape[-1] - ctx.width), ctx.width), None, None


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    all_gather_single(whole, part.contiguous(), group=group)
    whole = whole.unflatten(0, (group.size(), -1))
    return whole.movedim(0, -3).flatten(-3, -2)  # (n, ..., t, D) -> (..., T', D)


def _reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = whole.unflatten(-2, (group.size(), -1)).movedim(-3, 0).flatten(0, 1).contiguous()
    part = parts.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
    reduce_scatter_single(part, parts, group=group)
    return part  # (..., t, D)

"""Next-token cross entropy where each rank holds a part of the vocabulary.

A rank computes its columns of the logits, a chunk of tokens at a time, with their gradients in the
same pass; ranks exchange three numbers a token. Source: Shoeybi et al. 2019, arXiv:1909.08053, 3.
"""

# C tokens of a chunk, D d_model, V vocab, v this rank's part

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gptrain.loss import IGNORED, chunked_next_token_loss


def vocab_parallel_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy (nats) of whole hidden (..., D) under a head split by rows, alike on all ranks.

    Args:
        head_weight: DTensor (V, D), split by torch.chunk along V over its one mesh axis.
        chunk_tokens, reduction: as in chunked_next_token_loss.
    """
    mesh = head_weight.device_mesh
    start = mesh.get_local_rank() * -(-head_weight.shape[0] // mesh.size())
    return chunked_next_token_loss(
        hidden,
        head_weight.to_local(),
        targets,
        chunk_tokens=chunk_tokens,
        reduction=reduction,
        cross_entropy=partial(cross_entropy_over_ranks, start=start, group=mesh.get_group()),
    )


def cross_entropy_over_ranks(
    logits: Tensor, targets: Tensor, wants_gradient: bool, *, start: int, group: dist.ProcessGroup
) -> Tensor:
    """As cross_entropy_in_place, of logits (C, v) whose first column is that of token `start`."""
    counts, column = targets != IGNORED, targets - start
    here = counts & (column >= 0) & (column < logits.shape[1])
    counts, here, column = counts[:, None], here[:, None], column.where(here, 0)[:, None]  # (C, 1)
    highest = logits.amax(dim=-1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    target_logits = logits.sub_(highest).gather(1, column) * here
    exps = logits.exp_()
    sums = torch.cat((target_logits, exps.sum(dim=-1, keepdim=True)), dim=1)  # (C, 2)
    dist.all_reduce(sums, group=group)
    target_logits, sums = sums.split(1, dim=1)
    if wants_gradient:
        exps.mul_(counts / sums).scatter_add_(1, column, -here.to(exps.dtype))
    return (sums.log() - target_logits).where(counts, 0.0)

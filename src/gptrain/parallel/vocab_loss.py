"""Next-token cross entropy where each rank holds a part of the vocabulary.

A rank computes its columns of the logits, a chunk of tokens at a time, with their gradients in the
same pass; ranks exchange three numbers a token. Source: Shoeybi et al. 2019, arXiv:1909.08053, 3.
"""

# C tokens of a chunk, D d_model, V vocab, v this rank's part

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gptrain.loss import IGNORED, chunked_next_token_loss, logits_in_chunks
from gptrain.parallel.tensor import gather_vocabulary


def vocab_parallel_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Loss (nats) of whole hidden (..., D) under a head split by rows, the same on all ranks.

    Args:
        head_weight: DTensor (V, D), split by torch.chunk along V over its one mesh axis.
        chunk_tokens, reduction, label_smoothing, z_loss: as in chunked_next_token_loss.
    """
    mesh = head_weight.device_mesh
    start = mesh.get_local_rank() * -(-head_weight.shape[0] // mesh.size())
    part = {"start": start, "vocab_size": head_weight.shape[0], "group": mesh.get_group()}
    return chunked_next_token_loss(
        hidden,
        head_weight.to_local(),
        targets,
        chunk_tokens=chunk_tokens,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        cross_entropy=partial(cross_entropy_over_ranks, **part),
    )


def vocab_parallel_logits_in_chunks(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_tokens: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """As loss.logits_in_chunks, under a head split by rows: whole logits (C, V) on every rank."""
    group, vocab_size = head_weight.device_mesh.get_group(), head_weight.shape[0]
    local = head_weight.detach().to_local()
    for logits, counted in logits_in_chunks(hidden, local, targets, chunk_tokens):
        yield gather_vocabulary(logits, vocab_size, group), counted


def cross_entropy_over_ranks(
    logits: Tensor,
    targets: Tensor,
    wants_gradient: bool,
    label_smoothing: float,
    z_loss: float,
    *,
    start: int,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """As cross_entropy_in_place, of logits (C, v) whose first column is that of token `start`."""
    counts, column = targets != IGNORED, targets - start
    here = counts & (column >= 0) & (column < logits.shape[1])
    counts, here, column = counts[:, None], here[:, None], column.where(here, 0)[:, None]  # (C, 1)
    highest = logits.amax(dim=-1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    wanted = logits.sub_(highest).gather(1, column) * here
    if label_smoothing:
        share = logits.sum(dim=-1, keepdim=True) / vocab_size  # summed over ranks: the mean
        wanted.lerp_(share, label_smoothing)
    exps = logits.exp_()
    sums = torch.cat((wanted, exps.sum(dim=-1, keepdim=True)), dim=1)  # (C, 2)
    dist.all_reduce(sums, group=group)
    wanted, sums = sums.split(1, dim=1)
    losses, scale = sums.log() - wanted, counts / sums
    if z_loss:
        log_z = sums.log() + highest
        losses += z_loss * log_z.square()
        scale *= 1 + 2 * z_loss * log_z
    if wants_gradient:
        exps.mul_(scale)
        if label_smoothing:
            exps.sub_(counts.to(exps.dtype) * (label_smoothing / vocab_size))
        exps.scatter_add_(1, column, here.to(exps.dtype) * (label_smoothing - 1.0))
    return losses.where(counts, 0.0)

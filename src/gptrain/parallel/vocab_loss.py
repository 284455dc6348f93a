"""Next-token cross entropy where each rank holds a part of the vocabulary.

A rank computes its columns of the logits, a chunk of tokens at a time, with their gradients in the
same pass; ranks exchange three numbers a token. Source: Shoeybi et al. 2019, arXiv:1909.08053, 3.
"""

# N tokens, D d_model, V vocab, v this rank's part

import torch
import torch.distributed as dist
from torch import Tensor

from gptrain.loss import (
    IGNORED,
    cast_and_widen,
    check_reduction,
    count_targets,
    tokens_of_a_chunk,
)


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
    check_reduction(reduction)
    chunk_tokens = tokens_of_a_chunk(hidden.device) if chunk_tokens is None else chunk_tokens
    mesh = head_weight.device_mesh
    start = mesh.get_local_rank() * -(-head_weight.shape[0] // mesh.size())
    weight = head_weight.to_local()
    targets = targets.flatten()
    hidden, group = hidden.flatten(0, -2), mesh.get_group()  # (N, D)
    forms_gradients = torch.is_grad_enabled()  # inside a Function it is always off
    total = _VocabParallelLoss.apply(
        hidden, weight, targets, start, chunk_tokens, group, forms_gradients
    )
    return total if reduction == "sum" else total / count_targets(targets)


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, start, chunk_tokens, group, forms_gradients):
        device = hidden.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        w = cast_and_widen(weight, dtype)  # (w, D), rows of zeros beyond v
        needs_hidden, needs_weight = (
            forms_gradients and needed for needed in ctx.needs_input_grad[:2]
        )
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for first in range(0, len(targets), chunk_tokens):
            rows = slice(first, first + chunk_tokens)
            h, counted = hidden[rows].to(dtype), targets[rows] != IGNORED
            column = targets[rows] - start
            here = counted & (column >= 0) & (column < len(weight))
            column = column.masked_fill(~here, 0)[:, None]
            wide = (h @ w.T).float()
            logits = wide[:, : len(weight)]  # (n, v)
            highest = logits.amax(-1)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            logits -= highest[:, None]
            own = logits.gather(-1, column)[:, 0] * here
            sums = torch.stack((own, logits.exp_().sum(-1)))  # logits hold exp(logits) from here
            dist.all_reduce(sums, group=group)
            total += ((sums[1].log() - sums[0]) * counted).sum()
            if needs_hidden or needs_weight:
                logits *= (counted / sums[1])[:, None]
                logits.scatter_add_(-1, column, -here.float()[:, None])
                grad_logits = wide.to(dtype)
                if needs_hidden:
                    grad_hidden[rows] = grad_logits @ w
                if needs_weight:
                    grad_weight += (grad_logits.T @ h)[: len(weight)]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None

"""Next-token cross entropy, from logits or, without ever holding them whole, from hidden states."""

# N tokens of the batch (B * T), C tokens of a chunk, D d_model, V vocab, W V in whole WIDTHs

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptrain.core.lengths import loss_rows

# Rows of logits begin at a multiple of so many numbers: on a CPU, where they then begin on cache
# lines, products are 1.4 x faster; a GPU has no 16-bit kernels of full speed for other widths
# (NVIDIA's guide to matrix multiplication; nanoGPT's 50304 for 50257).
WIDTH = 64
IGNORED = -100  # a target that no loss counts: F.cross_entropy's own default


@dataclass(frozen=True)
class LossOptions:
    """What is added to the cross entropy.

    Attributes:
        label_smoothing: this fraction of the target is spread evenly over the vocabulary, as in
            F.cross_entropy (Szegedy et al. 2016, arXiv:1512.00567).
        z_loss: adds z_loss * logsumexp(logits)^2 per position, which keeps the softmax's
            normalizer near 1 (PaLM, arXiv:2204.02311, section 5: 1e-4).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = LossOptions()  # of val/loss: the cross entropy alone


def next_token_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy in nats of logits (..., V) against targets (...), a scalar, in fp32 or above.

    Args:
        targets: int64; -100 marks a position that counts for nothing.
        reduction: "mean" over the positions that count (0, not NaN, if none does), or "sum".
        label_smoothing, z_loss: as in `LossOptions`.
    """
    targets = targets.flatten()  # (N,)
    losses = losses_of_rows(logits.flatten(0, -2), targets, label_smoothing, z_loss)
    return reduce_total(losses.sum(), targets, reduction)


def losses_of_rows(
    logits: Tensor, targets: Tensor, label_smoothing: float, z_loss: float
) -> Tensor:
    """Losses (N,) of logits (N, V) against targets (N,), 0 where a target counts for nothing."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing
    )
    if z_loss:
        log_z = logits.logsumexp(dim=-1).where(targets != IGNORED, 0.0)
        losses = losses + z_loss * log_z.square()
    return losses


def cross_entropy_in_place(
    logits: Tensor,
    targets: Tensor,
    n_columns: int,
    wants_gradient: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    *,
    start: int = 0,
    vocab_size: int | None = None,
    all_reduce: Callable[[Tensor, str], None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Losses (C, 1) of logits (C, W), of which the first n_columns count, and their gradient.

    The gradient, d(sum of losses)/d(logits), takes the memory of the logits. One exponential and
    few passes: 1.6 times faster than logsumexp followed by a softmax. Ignored rows have loss 0 and
    gradient 0.

    Args:
        start, vocab_size, all_reduce: where each rank has only n_columns of vocab_size, this one
            those from start on; all_reduce(tensor, "max" or "sum") combines all ranks' in place.
    """
    given = logits
    exact = given.to(torch.promote_types(given.dtype, torch.float32))  # in fp32 the given ones
    logits, vocab_size = exact[:, :n_columns], vocab_size or n_columns
    counts, columns = (targets != IGNORED)[:, None], (targets - start)[:, None]  # (C, 1)
    here = counts if all_reduce is None else counts & (columns >= 0) & (columns < n_columns)
    columns = columns.where(here, 0)
    highest = logits.amax(dim=-1, keepdim=True)  # (C, 1)
    if all_reduce is not None:
        all_reduce(highest, "max")
    logits.sub_(highest)
    wanted = logits.gather(1, columns).where(here, 0.0)  # target probabilities times logits
    if label_smoothing:
        mean = logits.sum(dim=-1, keepdim=True) / vocab_size
        wanted = wanted.lerp(mean, label_smoothing)
    exps = logits.exp_()
    sums = exps.sum(dim=-1, keepdim=True)  # (C, 1)
    if all_reduce is not None:
        both = torch.cat((sums, wanted), dim=1)  # (C, 2)
        all_reduce(both, "sum")
        sums, wanted = both.split(1, dim=1)
    losses, scale = sums.log() - wanted, counts / sums
    if z_loss:
        log_z = sums.log() + highest
        losses += z_loss * log_z.square()
        scale *= 1 + 2 * z_loss * log_z
    losses = losses.where(counts, 0.0)
    if not wants_gradient:
        return losses, None
    exps.mul_(scale)
    if label_smoothing:
        exps.sub_(counts.to(exps.dtype) * (label_smoothing / vocab_size))
    exps.scatter_add_(1, columns, here.to(exps.dtype) * (label_smoothing - 1.0))
    return losses, given.copy_(exact)


def chunked_next_token_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    cross_entropy: Callable[..., tuple[Tensor, Tensor | None]] = cross_entropy_in_place,
) -> Tensor:
    """next_token_loss(hidden @ head_weight.T, targets), without the (N, V) logits.

    The head is applied to chunk_tokens rows at a time and the gradients of that chunk are formed
    in the same pass, so that no more than a few (C, V) tensors exist at once and the head's matrix
    products are not computed twice. Under autocast the products are taken in its type; softmax,
    the sum over tokens and the head's gradient are accumulated in fp32 (the plain loss rounds the
    latter once to autocast's type). Differentiable once; without grad mode no gradient is formed.

    Args:
        hidden: (..., D).   head_weight: (V, D).   targets: (...), as in next_token_loss.
        chunk_tokens: a larger number reads and writes the head's gradient (V, D) less often, which
            on a GPU is what it costs; a smaller one saves memory. None: what suits the device.
        reduction, label_smoothing, z_loss: as in next_token_loss.
        cross_entropy: of one chunk; another where logits (C, V) are this rank's part of them.

    Forward and backward, 508 x 512 x 50257 in fp32, one thread of an AMD EPYC (AVX2), torch 2.13.0,
    November 2026: time as a fraction of the first line's, and peak memory over inputs:

        F.cross_entropy(F.linear(...))  1.00, 306 MB; under torch.compile 0.93, 195 MB
        F.linear_cross_entropy (2.13)   0.99, 312 MB
        this, chunks of 128 to 508      0.76, 103 to 205 MB, of which the head's gradient is 103
    """
    chunk_tokens = chunk_tokens or loss_rows(hidden.device.type)
    cross_entropy = partial(cross_entropy, label_smoothing=label_smoothing, z_loss=z_loss)
    hidden = hidden.flatten(0, -2)  # (N, D)
    targets = targets.flatten()  # (N,)
    learns = torch.is_grad_enabled()  # inside a Function it is always off
    total = _ChunkedLoss.apply(hidden, head_weight, targets, chunk_tokens, cross_entropy, learns)
    # Divided here, the gradients of the logits were formed between -1 and 1: divided by the number
    # of tokens first, they would vanish in fp16, which is before a loss scaler can help.
    return reduce_total(total, targets, reduction)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk_tokens, cross_entropy, learns):
        device = hidden.device.type
        is_autocast = torch.is_autocast_enabled(device)
        matmul_dtype = torch.get_autocast_dtype(device) if is_autocast else hidden.dtype
        sum_dtype = torch.promote_types(matmul_dtype, torch.float32)
        wants_hidden, wants_weight = (learns and needed for needed in ctx.needs_input_grad[:2])
        wants_gradient = wants_hidden or wants_weight
        grad_hidden: Any = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Any = torch.zeros_like(weight, dtype=sum_dtype) if wants_weight else None

        with torch.autocast(device, enabled=False):
            weight_cast = cast_and_widen(weight, matmul_dtype)  # (W, D)
            total = torch.zeros((), dtype=sum_dtype, device=hidden.device)
            n_rows, width = min(chunk_tokens, len(targets)), round_up(len(weight), WIDTH)
            memory = hidden.new_empty(n_rows, width, dtype=matmul_dtype)  # of one chunk, for all
            for start in range(0, len(targets), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                hidden_cast = hidden[rows].to(matmul_dtype)  # (C, D)
                logits = memory[: len(hidden_cast), : len(weight_cast)]  # (C, W), 0 beyond V
                torch.mm(hidden_cast, weight_cast.T, out=logits)
                losses, grad_logits = cross_entropy(
                    logits, targets[rows], len(weight), wants_gradient
                )
                total += losses.sum()
                if wants_hidden:
                    grad_hidden[rows] = grad_logits @ weight_cast  # (C, D)
                if wants_weight and matmul_dtype == sum_dtype:
                    grad_weight.addmm_(grad_logits.T, hidden_cast)  # (V, D)
                elif wants_weight:
                    grad_weight += (grad_logits.T @ hidden_cast)[: len(weight)]
                del grad_logits  # where it has memory of its own: as large as that of the next

        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        # In place: these buffers become the gradients. A second backward is refused by autograd,
        # which sees that what was saved has changed.
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden.mul_(grad_loss)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


@torch.no_grad()
def logits_in_chunks(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    chunk_tokens: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits (C, V), fp32 or above, and targets (C,) of the positions that count, for metrics.

    The rows of `head(hidden)` whose target is not -100, chunk_tokens at a time, without gradient.
    """
    chunk_tokens = chunk_tokens or loss_rows(hidden.device.type)
    counts = targets != IGNORED
    chunks = hidden[counts].split(chunk_tokens), targets[counts].split(chunk_tokens)
    for chunk, chunk_targets in zip(*chunks, strict=True):
        if len(chunk):  # of nothing there is one, empty
            logits = head(chunk)
            yield logits.to(torch.promote_types(logits.dtype, torch.float32)), chunk_targets


def cast_and_widen(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight (V, D) in dtype: of 16 bit it has rows of zeros up to a multiple of WIDTH.

    Their logits are 0 and nobody's. In fp32 it is weight itself: a copy would cost its memory.
    """
    if dtype == torch.promote_types(dtype, torch.float32):
        return weight.to(dtype)
    wide = weight.new_zeros(round_up(len(weight), WIDTH), weight.shape[1], dtype=dtype)
    wide[: len(weight)] = weight
    return wide


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def reduce_total(total: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """A sum over the targets that count, or their mean."""
    return total / {"sum": 1, "mean": count_targets(targets)}[reduction]


def count_targets(targets: Tensor) -> Tensor:
    """How many targets count, at least 1, as a tensor: reading it would wait for the device."""
    return (targets != IGNORED).sum().clamp(min=1)

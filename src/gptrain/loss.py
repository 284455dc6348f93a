"""Next-token cross entropy, computed from logits or in chunks from hidden states.

The chunked loss applies the head to a part of the tokens at a time and therefore never holds the
logits of the full batch in memory.
"""

# N tokens of the batch (B * T), C tokens of a chunk, D d_model, V vocab, W padded V

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptrain.core.lengths import loss_rows

# The vocabulary is padded to a multiple of this number for 16-bit matrix multiplications. On a CPU,
# rows of logits then begin on cache lines, and the multiplications are 1.4 times faster. On a GPU,
# 16-bit kernels reach full speed only for such widths (NVIDIA's guide to matrix multiplication;
# nanoGPT pads GPT-2's vocabulary of 50257 to 50304).
VOCAB_MULTIPLE = 64
IGNORED = -100  # target that no loss counts, the default ignore_index of F.cross_entropy
NO_TARGET = "no target counts, all are -100"  # text of errors and warnings


@dataclass(frozen=True)
class LossOptions:
    """Changes of the cross entropy for training: label smoothing and z-loss.

    Attributes:
        label_smoothing: Fraction of the target probability that is spread evenly over the
            vocabulary, as in F.cross_entropy (Szegedy et al. 2016, arXiv:1512.00567). 0 changes
            nothing.
        z_loss: Factor of the term logsumexp(logits)^2 that is added to the loss of each target, and
            keeps the normalizer of the softmax near 1 (PaLM, arXiv:2204.02311, section 5: 1e-4). 0
            adds nothing.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN_CROSS_ENTROPY = LossOptions()  # cross entropy without additional terms, as in val/loss


def token_losses(
    logits: Tensor, targets: Tensor, options: LossOptions = PLAIN_CROSS_ENTROPY
) -> Tensor:
    """Compute the cross entropy of each token in nats, (N,), which is 0 if the target is -100.

    The result is in fp64 for logits in fp64, else in fp32.

    Args:
        logits: Logits, (..., V).
        targets: Target token ids, (...), int64, N in all. Positions with target -100 do not count.
        options: Label smoothing and z-loss.
    """
    logits, targets = logits.flatten(0, -2), targets.flatten()  # (N, V), (N,)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    smoothing = options.label_smoothing
    losses = F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    if options.z_loss:
        log_z = logits.logsumexp(dim=-1).where(targets != IGNORED, 0.0)
        losses = losses + options.z_loss * log_z.square()
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
    """Compute the loss of each row of logits and the gradient of the sum of the losses.

    The gradient overwrites the logits, which takes less time and memory than autograd. A row with
    target -100 has the loss 0 and the gradient 0.

    Under tensor parallelism each rank has some columns of the logits. `start`, `vocab_size` and
    `all_reduce` describe the split. All ranks must then call the function, and all get the losses
    of the full vocabulary.

    Args:
        logits: Logits, (C, W), whose values may be lost. Columns from `n_columns` on are padding
            and keep their values.
        targets: Target token ids, (C,), int64.
        n_columns: Number of columns of this rank that are tokens.
        wants_gradient: True if the gradient is needed.
        label_smoothing, z_loss: As in `LossOptions`.
        start: Token id of this rank's first column.
        vocab_size: Number of tokens of all ranks. None stands for `n_columns`.
        all_reduce: Function that reduces a tensor over the ranks in place, with "max" or "sum" as
            its second argument. None if this rank has all columns.

    Returns:
        The losses (C, 1), in fp64 for logits in fp64, else in fp32; and the gradient, which is the
        tensor `logits`, or None unless `wants_gradient`.
    """
    padded_logits = logits
    # For fp32 and fp64 logits this is no copy: the operations in place then change the argument.
    padded_exact = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (C, W)
    logits = padded_exact[:, :n_columns]
    vocab_size = vocab_size or n_columns
    counts = (targets != IGNORED)[:, None]  # (C, 1)
    columns = (targets - start)[:, None]  # (C, 1)
    is_local = counts if all_reduce is None else counts & (columns >= 0) & (columns < n_columns)
    columns = columns.where(is_local, 0)
    highest = logits.amax(dim=-1, keepdim=True)  # (C, 1)
    if all_reduce is not None:
        all_reduce(highest, "max")
    # Mean of the logits under the target distribution, (C, 1)
    target_logits = (logits.gather(1, columns) - highest).where(is_local, 0.0)
    logits.sub_(highest)
    if label_smoothing:
        mean = logits.sum(dim=-1, keepdim=True) / vocab_size
        target_logits = target_logits.lerp(mean, label_smoothing)
    exps = logits.exp_()
    sums = exps.sum(dim=-1, keepdim=True)  # (C, 1)
    if all_reduce is not None:
        both = torch.cat((sums, target_logits), dim=1)  # (C, 2)
        all_reduce(both, "sum")
        sums, target_logits = both.split(1, dim=1)
    losses = sums.log() - target_logits
    scale = counts / sums
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
    if torch.compiler.is_compiling():
        # The compiler would write the fp32 values to memory for a scatter.
        is_target = torch.arange(n_columns, device=logits.device) == columns  # (C, V)
        exps.add_((is_target & is_local) * (label_smoothing - 1.0))
    else:
        exps.scatter_add_(1, columns, is_local.to(exps.dtype) * (label_smoothing - 1.0))
    return losses, padded_logits.copy_(padded_exact)


def chunked_loss_sum(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    options: LossOptions = PLAIN_CROSS_ENTROPY,
    *,
    chunk_tokens: int | None = None,
    cross_entropy: Callable[..., tuple[Tensor, Tensor | None]] = cross_entropy_in_place,
) -> Tensor:
    """Compute the sum of token_losses(hidden @ head_weight.T, targets) without the (N, V) logits.

    The forward pass computes the logits of `chunk_tokens` positions at a time, and their gradients,
    if any are needed, at once. So only a few (C, V) tensors exist at any time. Under autocast the
    matrix multiplications use its dtype. The losses and the gradient of the head are summed in
    fp32, or in fp64 if the multiplications are in fp64.

    The caller divides the sum. Gradients of the sum with respect to logits have a size of up to 1.
    Those of the mean would underflow in fp16: the loss scaler acts only in the backward pass.

    Args:
        hidden: Hidden states, (..., D).
        head_weight: Weight of the head, (V, D).
        targets: Target token ids, (...), int64. Positions with target -100 do not count.
        options: Label smoothing and z-loss.
        chunk_tokens: Number of positions C of a chunk. More take more memory, and on a GPU less
            time. None chooses by device type.
        cross_entropy: `cross_entropy_in_place`, or a function with its first six arguments and its
            result.

    Raises:
        RuntimeError: In the backward pass of the result, if it runs a second time or computes
            second derivatives.

    Time and peak memory beyond the inputs, for forward and backward with 508 tokens, D = 512 and V
    = 50257 in fp32, on one thread of an AMD EPYC (AVX2), torch 2.13.0, November 2026:

        F.cross_entropy(F.linear(...))    1.00, 306 MB; with torch.compile 0.93, 195 MB
        F.linear_cross_entropy (2.13)     0.99, 312 MB
        this function, C from 128 to 508  0.76, 103 to 205 MB, of which the head's gradient has 103
    """
    chunk_tokens = chunk_tokens or loss_rows(hidden.device.type)
    cross_entropy = partial(cross_entropy, **asdict(options))
    hidden, targets = hidden.flatten(0, -2), targets.flatten()  # (N, D), (N,)
    grad_enabled = torch.is_grad_enabled()  # grad mode is always off inside a Function
    return _ChunkedLoss.apply(
        hidden, head_weight, targets, chunk_tokens, cross_entropy, grad_enabled
    )


class _ChunkedLoss(torch.autograd.Function):
    """Compute the sum of the losses; the forward pass also computes the gradients of the inputs."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk_tokens, cross_entropy, grad_enabled):
        device = hidden.device.type
        is_autocast = torch.is_autocast_enabled(device)
        matmul_dtype = torch.get_autocast_dtype(device) if is_autocast else hidden.dtype
        sum_dtype = torch.promote_types(matmul_dtype, torch.float32)
        wants_hidden = grad_enabled and ctx.needs_input_grad[0]
        wants_weight = grad_enabled and ctx.needs_input_grad[1]
        wants_gradient = wants_hidden or wants_weight
        grad_hidden: Any = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Any = torch.zeros_like(weight, dtype=sum_dtype) if wants_weight else None

        with torch.autocast(device, enabled=False):
            weight_cast = _cast_and_pad(weight, matmul_dtype)  # (V, D) -> (W, D)
            total = torch.zeros((), dtype=sum_dtype, device=hidden.device)
            # Memory for the logits of one chunk, which all chunks use in turn
            n_rows = min(chunk_tokens, len(targets))
            width = _round_up(len(weight), VOCAB_MULTIPLE)
            memory = hidden.new_empty(n_rows, width, dtype=matmul_dtype)
            for start in range(0, len(targets), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                hidden_cast = hidden[rows].to(matmul_dtype)  # (C, D)
                # (C, W); columns of padding tokens are 0. Without padding, W = V.
                logits = memory[: len(hidden_cast), : len(weight_cast)]
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
                # Free the memory, if cross_entropy allocated any, before the next chunk.
                del grad_logits

        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        # Scale the saved buffers in place, so that they become the gradients without a copy.
        # Autograd detects the change and raises an error if backward is called twice.
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
    """Yield the logits and the targets of some positions at a time, for metrics.

    Positions with target -100 are left out; nothing is yielded if all have it. No gradient is
    computed. The logits of the full batch are never in memory.

    Args:
        hidden: Hidden states, (..., D).
        head: Function from hidden states (C, D) to logits (C, V).
        targets: Target token ids, (...), int64.
        chunk_tokens: Largest number of positions C of a chunk. None chooses by device type.

    Yields:
        Logits (C, V), in fp64 if `head` returns fp64, else in fp32; and targets (C,).
    """
    chunk_tokens = chunk_tokens or loss_rows(hidden.device.type)
    counts = targets != IGNORED
    hidden_chunks = hidden[counts].split(chunk_tokens)
    target_chunks = targets[counts].split(chunk_tokens)
    for chunk, chunk_targets in zip(hidden_chunks, target_chunks, strict=True):
        if len(chunk):  # split() of an empty tensor returns one empty chunk
            logits = head(chunk)
            yield logits.to(torch.promote_types(logits.dtype, torch.float32)), chunk_targets


def _cast_and_pad(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the head's weight (V, D), and pad a 16-bit result with zero rows: kernels are faster."""
    if dtype == torch.promote_types(dtype, torch.float32):
        return weight.to(dtype)
    padded = weight.new_zeros(_round_up(len(weight), VOCAB_MULTIPLE), weight.shape[1], dtype=dtype)
    padded[: len(weight)] = weight
    return padded


def _round_up(number: int, multiple: int) -> int:
    """Round a number up to a multiple of another number."""
    return -(-number // multiple) * multiple


def count_targets(targets: Tensor) -> Tensor:
    """Return the number of targets that are not -100, but at least 1, so that it can divide.

    The result is a scalar int64 tensor on the device of the targets, so that the host does not
    wait.
    """
    return (targets != IGNORED).sum().clamp(min=1)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums of many losses or counts: float32 on MPS, else float64."""
    return torch.float32 if device.type == "mps" else torch.float64

"""Memory of a rank: its parameters with their states, and what a step adds to them."""

# D d_model, F d_ff, V vocab, C rows of the loss's chunk

from __future__ import annotations

from gptrain.core.lengths import loss_rows
from gptrain.costs.work import Work


def estimate_states(work: Work) -> dict[str, float]:
    """Bytes of a rank's weights, gradients and optimizer states.

    Mixed precision keeps fp32 weights. Exact where sizes divide; else off by less than a row of a
    matrix per parameter. Uneven stages: ask for the first rank and the last.
    """
    held, costs = work.weight_bytes * sum(work.held), work.costs
    states = work.optimizer.state_bytes(work) + held * costs.extra_per_parameter
    sizes = {"weights": held, "gradients": held, "optimizer": states}
    return {key: n_bytes / costs.n_shards for key, n_bytes in sizes.items()}


def estimate_memory(work: Work) -> dict[str, float]:
    """Bytes of a rank: weights, gradients, optimizer, activations, logits, buffers, total.

    The total is the peak of a step and at most their sum: gradients are formed while activations
    are freed. It is the maximum over four moments: the loss, the backward passes of the last block,
    of the first, and of the token table, whose gradient is complete before it is added. Tensors
    alone: no process, no context of a GPU, nothing that an allocator wastes.
    """
    shape, states, n = work.shape, estimate_states(work), work.dims.tensor
    n_blocks, _, is_last = work.part
    tokens, gradients = work.tokens / work.microbatches, states["gradients"]
    alive = work.costs.live_microbatches(work.rank)
    kept, again = block_activations(work)
    row = shape.d_model * work.row_bytes / n  # of the residual stream
    activations = tokens * (n_blocks * kept * alive + is_last * 2 * row)
    table = shape.table / n
    # The head's 16-bit copy and its gradient; a CPU adds that in fp32.
    casts = work.is_mixed * table * (8 if work.is_cpu else 4)
    rows = min(loss_rows("cpu" if work.is_cpu else "cuda"), tokens)
    logits = is_last * (rows * shape.vocab_size / n * (4 + 2 * work.is_mixed) + casts)
    inner = (1 + shape.is_gated) * shape.d_ff + work.is_cast * shape.d_model
    once = row + inner / n * work.product_bytes
    # Gathered, and in the order of time; gloo may not have freed those of the collective before.
    once += (n > 1) * (8 if work.is_cpu else 4) * shape.d_model * work.product_bytes
    once = tokens * (again + once)  # in the backward pass of one block

    copies, early, block, last = work.costs.step_memory(work, gradients)
    once += block
    head = is_last * table * work.weight_bytes
    peaks = (
        early + activations + is_last * tokens * row + head + logits + copies,
        early + activations + head + once + copies,
        max(early, gradients) + tokens * kept + once + copies,
        last,
    )
    once = max(once, max(peaks) - copies - gradients - activations - logits)
    parts = {"activations": activations, "logits": logits, "buffers": copies + once}
    return states | parts | {"total": states["weights"] + states["optimizer"] + max(peaks)}


def block_activations(work: Work) -> tuple[float, float]:
    """Bytes per token that a block keeps for its backward pass, and that it then computes again.

    The inputs of both norms; what q, k, v and the MLP multiply; q, k, v and the attention's output;
    the MLP's inner values; the statistics of norms and softmax. Under autocast each matrix has a
    16-bit copy of its input to itself. A CPU's RMSNorm of 16 bits keeps its input, and what it
    multiplies by its weight, in fp32.
    """
    shape, n, each = work.shape, work.dims.tensor, work.product_bytes
    row = shape.d_model * work.row_bytes / n
    normed = (4 + shape.is_gated if work.is_cast else 2) * shape.d_model * each
    # What a norm keeps of a number.
    in_fp32 = work.is_cpu and not shape.has_biases and work.row_bytes != 4
    norm = 8 if in_fp32 else work.row_bytes
    attended = (2 * shape.d_model + 2 * shape.d_kv) / n * each + 4 * shape.n_heads / n
    inner, out = shape.d_ff / n * each, shape.d_model / n * each
    # torch's fused attention for CPUs knows no dropout, whose masks are numbers there.
    scores = bool(work.dropout and work.is_cpu) * 3 * work.seq_len * shape.n_heads / n * each
    masks = bool(work.dropout) * 2 * shape.d_model / n * (each if work.is_cpu else 1)
    heads = shape.has_qk_norm * (8 if in_fp32 else each) * (shape.d_model + shape.d_kv) / n
    whole = 2 * norm * shape.d_model / n + 16 + normed + attended + (2 + 2 * shape.is_gated) * inner
    whole += heads + scores + masks
    outputs = attended + (1 + shape.is_gated) * inner + 2 * out
    kept = {"none": whole, "selective": row + outputs, "full": row}[work.checkpointing]
    return kept, max(0.0, whole - kept + 2 * out * (work.checkpointing == "selective"))

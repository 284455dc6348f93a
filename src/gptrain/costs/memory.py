"""Memory of a rank: its parameters with their states, and what a step adds to them."""

# D d_model, F d_ff, V vocab, C rows of the loss's chunk

from __future__ import annotations

from gptrain.core.lengths import loss_rows
from gptrain.core.strategies import DDPOptions, DiLoCoOptions, PipelineOptions, ShardedOptions
from gptrain.costs.work import Work

# States per parameter of torch's optimizers; of all others two, as Adam has.
_STATES = {"SGD": 0, "Adafactor": 0, "RMSprop": 1, "Adagrad": 1, "ASGD": 1}


def estimate_states(work: Work) -> dict[str, float]:
    """Bytes of a rank's weights, gradients and optimizer states.

    Mixed precision keeps fp32 weights. Exact where sizes divide; else off by less than a row of a
    matrix per parameter. Uneven stages: ask for the first rank and the last.
    """
    held = sum(work.held)
    states = held * states_per_weight(work.optimizer, work.momentum)
    if work.is_muon:  # one of hidden matrices, AdamW's two of the rest
        states -= work.part[0] * work.shape.block_matrices / work.dims.tensor
    if isinstance(work.options, DiLoCoOptions):  # the last synchronized weights, outer momentum
        states += held * (1 + bool(work.options.outer_momentum))
    sizes = {"weights": held, "gradients": held, "optimizer": states}
    return {key: n * work.weight_bytes / work.n_shards for key, n in sizes.items()}


def states_per_weight(optimizer: str, momentum: float) -> int:
    """Numbers that an optimizer keeps of each weight; at most, where it keeps more of some.

    Args:
        optimizer: its `_target_`.   momentum: SGD's.
    """
    name = optimizer.rpartition(".")[2]
    return 1 if name == "SGD" and momentum else _STATES.get(name, 2)


def estimate_memory(work: Work) -> dict[str, float]:
    """Bytes of a rank: weights, gradients, optimizer, activations, logits, buffers, total.

    The total is the peak of a step and at most their sum: gradients are formed while activations
    are freed. It is the maximum over four moments: the loss, the backward passes of the last block,
    of the first, and of the token table, whose gradient is complete before it is added. Tensors
    alone: no process, no context of a GPU, nothing that an allocator wastes.
    """
    shape, states, n = work.shape, estimate_states(work), work.dims.tensor
    options, n_micro, (n_blocks, is_first, is_last) = work.options, work.microbatches, work.part
    tokens, gradients = work.tokens / n_micro, states["gradients"]
    alive, each = work.dims.pipeline - work.rank, work.stages_per_rank  # microbatches, under 1F1B
    alive += (each > 1) * (work.dims.pipeline - 1) / each
    is_gpipe = isinstance(options, PipelineOptions) and options.schedule == "gpipe"
    alive = n_micro if is_gpipe else min(n_micro, alive)
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

    blocks, root = work.parameters()
    copies = 0.0  # weights gathered, or in 16 bit until the backward pass; buckets
    table *= work.weight_bytes
    has_buckets = work.strategy in ("ddp", "diloco") and work.step_ranks > 1
    stay = work.accumulate > 1 or n_micro > 1 or has_buckets  # during a forward pass
    early, head = stay * gradients, is_last * table
    if isinstance(options, ShardedOptions):
        whole = min(1, 2 / n_blocks) if options.reshard_after_forward else 1
        copies = (root + whole * blocks) * work.product_bytes
        if work.accumulate > 1 and not options.accumulate_shards:
            early = (blocks + root) * work.weight_bytes
        # Gradients as they are formed, and as they are sent, before they are cut.
        cut = work.product_bytes + work.weight_bytes
        once += blocks / n_blocks * cut
        last = max(early, gradients) + root * (cut + work.is_cpu * work.weight_bytes)  # gloo's copy
    else:
        if work.is_mixed and work.checkpointing != "full":
            copies = 2 * n_blocks * shape.block_matrices / n
        if isinstance(options, DDPOptions) and not options.gradient_as_bucket_view:
            copies += gradients
        last = gradients + is_first * (1 + stay) * table + copies
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

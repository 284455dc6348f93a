"""Memory of a rank: weights, gradients, optimizer states, and the tensors of a training step.

The formulas count the tensors that `gptrain.models` and torch allocate. `tests/plan_accuracy.py`
compares them with measured runs. All results are in bytes.
"""

from gptrain.core.lengths import loss_rows
from gptrain.costs.work import Work


def estimate_states(work: Work) -> dict[str, float]:
    """Return the bytes of a rank's weights, gradients and optimizer states.

    Mixed precision keeps fp32 weights. The result is exact if the numbers of ranks divide the
    sizes. Otherwise the error is less than one row of a matrix per parameter.

    Args:
        work: Facts about the rank's optimizer step. Stages of a pipeline differ in size:
            `work.ends` has the steps of its first and its last rank.

    Returns:
        {"weights", "gradients", "optimizer"} in bytes.
    """
    weights = work.weight_bytes * sum(work.held)
    extra_states = weights * work.costs.extra_per_parameter
    optimizer = work.optimizer.state_bytes(work) + extra_states
    sizes = {"weights": weights, "gradients": weights, "optimizer": optimizer}
    return {name: n_bytes / work.costs.n_shards for name, n_bytes in sizes.items()}


def estimate_memory(work: Work) -> dict[str, float]:
    """Return the bytes of each part of a rank's memory, and in `total` the peak during a step.

    The total is at most the sum of the parts, because gradients are allocated while activations are
    freed. The peak is the maximum over these moments of the last micro-step: the loss, the backward
    pass of the last block and its end, that of the block before it, that of the first block and its
    end, and the addition of the token table's gradient.

    Only tensors are counted. The memory of the process, the CUDA context and the fragmentation of
    the allocator come on top.

    Args:
        work: Facts about the rank's optimizer step.

    Returns:
        {"weights", "gradients", "optimizer", "activations", "logits", "buffers", "total"} in bytes.
        "buffers" are gathered weights, 16-bit copies, DDP's buckets, and the tensors that exist
        during the backward pass of one block.
    """
    shape = work.shape
    states = estimate_states(work)
    gradients = states["gradients"]
    n_tensor = work.dims.tensor
    n_blocks, _, is_last = work.part
    tokens = work.rank_tokens / work.microbatches  # tokens of one microbatch

    # Activations. The last stage also keeps the input and the output of the last norm.
    kept_per_token, recomputed_per_token = block_activations(work)
    live_microbatches = work.costs.live_microbatches(work.rank)
    row = shape.d_model * work.row_bytes / n_tensor  # bytes per token of the residual stream
    last_rows = 2 * row if is_last else 0
    activations = tokens * (n_blocks * kept_per_token * live_microbatches + last_rows)

    # Logits of one chunk of the loss: in fp32, and in 16 bits if the head multiplies in 16 bits.
    # Mixed precision adds a 16-bit copy of the head and its gradient. A CPU adds the gradient in
    # fp32.
    table = shape.table / n_tensor
    logits = 0.0
    if is_last:
        head_bytes = 0
        if work.is_mixed:
            head_bytes = 8 if work.is_cpu else 4
        logit_bytes = 6 if work.is_mixed else 4
        rows = min(loss_rows("cpu" if work.is_cpu else "cuda"), tokens)
        logits = rows * shape.vocab_size / n_tensor * logit_bytes + table * head_bytes

    # Bytes that exist during the backward pass of one block: the gradients of the residual stream
    # and of the values inside the MLP.
    inner_width = shape.n_up_matrices * shape.d_ff
    if work.is_cast:
        inner_width += shape.d_model
    block_per_token = row + inner_width / n_tensor * work.matmul_bytes
    if n_tensor > 1:
        # Sequences are gathered and then copied into the order of time. With gloo, the tensors of
        # the previous collective may not be freed yet.
        n_gathered = 8 if work.is_cpu else 4
        block_per_token += n_gathered * shape.d_model * work.matmul_bytes
    block = tokens * (recomputed_per_token + block_per_token)

    strategy = work.costs.step_memory(work, gradients)
    head_gradient = table * work.weight_bytes if is_last else 0
    last_row = tokens * row if is_last else 0
    kept = tokens * kept_per_token  # activations of one block
    before_backward = strategy.early + activations + head_gradient
    before_first_block = max(strategy.early, gradients) + kept
    peaks = (
        before_backward + last_row + logits,
        before_backward + block,
        before_backward - kept + strategy.after_block,
        before_backward - kept + block + strategy.in_block,
        before_first_block + block + strategy.in_block,
        before_first_block - kept + strategy.after_block,
    )
    peak = max(max(peaks) + strategy.copies, strategy.last)
    # The buffers are at least what the peak has in addition to the other parts.
    block = max(block, peak - strategy.copies - gradients - activations - logits)
    parts = {
        "activations": activations,
        "logits": logits,
        "buffers": strategy.copies + block,
        "total": states["weights"] + states["optimizer"] + peak,
    }
    return states | parts


def block_activations(work: Work) -> tuple[float, float]:
    """Return the bytes per token that a block keeps for its backward pass, and that it recomputes.

    Without activation checkpointing a block keeps the inputs of both norms, the inputs of its
    matrices, q, k, v and the output of the attention, the values inside the MLP, and the statistics
    of norms and softmax. "selective" keeps the outputs of matrices, "full" the input of the block.

    Under autocast each matrix has its own 16-bit copy of its input. On a CPU, RMSNorm of 16-bit
    values keeps its input and its normalized values in fp32. On a GPU, autocast computes LayerNorm
    in fp32.

    Args:
        work: Facts about the rank's optimizer step.

    Returns:
        Bytes that are kept and bytes that are recomputed, both per token of one rank.
    """
    shape = work.shape
    n_tensor = work.dims.tensor
    value_bytes = work.matmul_bytes
    row = shape.d_model * work.row_bytes / n_tensor

    # Inputs of q, k, v and up (and gate): each its own copy under autocast, else one per norm.
    is_fp32_layer_norm = work.is_mixed and shape.has_biases and not work.is_cpu
    n_normed = 3 + shape.n_up_matrices if work.is_cast or is_fp32_layer_norm else 2
    normed = n_normed * shape.d_model * value_bytes
    keeps_norm_in_fp32 = work.is_cpu and not shape.has_biases and work.row_bytes != 4
    norm_bytes = 4 if is_fp32_layer_norm else work.row_bytes  # per element of a norm's input
    norm_bytes = 8 if keeps_norm_in_fp32 else norm_bytes
    norm_statistics = 16  # fp32 mean and 1 / std of two LayerNorms; RMSNorm has less

    # q and the output of the attention, k and v; the fp32 logsumexp of each head.
    # attention.attend repeats grouped k and v in fp32 on a GPU.
    is_repeated = value_bytes == 4 and not work.is_cpu
    attention_width = 2 * shape.d_q + 2 * (shape.d_q if is_repeated else shape.d_kv)
    attention = attention_width / n_tensor * value_bytes + 4 * shape.n_heads / n_tensor
    exchanged = 0.0
    if work.dims.context > 1:
        # The output of attention before its exchange, and repeated heads of k and v.
        exchanged = (shape.d_q + 2 * (work.kv_width - shape.d_kv)) * value_bytes
    inner = shape.d_ff / n_tensor * value_bytes  # bytes of one tensor of width d_ff
    block_output = shape.d_model / n_tensor * value_bytes

    scores = masks = 0.0
    if work.dropout:
        # A mask is one byte per element on a GPU, and has the type of the values on a CPU.
        mask_bytes = value_bytes if work.is_cpu else 1
        masks = 2 * shape.d_model / n_tensor * mask_bytes
        if work.is_cpu:
            # torch's fused attention for CPUs has no dropout: three (T, T) matrices per head.
            scores = 3 * work.seq_len * shape.n_heads / n_tensor * value_bytes
    head_norms = 0.0
    if shape.has_qk_norm:
        head_norm_bytes = 8 if keeps_norm_in_fp32 else value_bytes
        head_norms = head_norm_bytes * (shape.d_q + shape.d_kv) / n_tensor

    everything = 2 * norm_bytes * shape.d_model / n_tensor + norm_statistics + normed + attention
    everything += 2 * shape.n_up_matrices * inner
    everything += head_norms + scores + masks + exchanged
    if work.checkpointing == "none":
        return everything, 0.0
    if work.checkpointing == "full":
        return row, max(0.0, everything - row)
    # "selective" also keeps the outputs of out and down, which are not part of `everything`.
    outputs = attention + shape.n_up_matrices * inner + 2 * block_output
    kept = row + outputs
    return kept, max(0.0, everything - kept + 2 * block_output)

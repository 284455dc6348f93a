"""Bytes that a rank sends in one optimizer step, by strategy: what counted bytes are held against.

Collectives are taken as rings, whose traffic is the least possible (Patarasuk & Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002): of b bytes that each of n ranks holds, or will hold, whole, a rank
sends (n-1)/n b in an all-gather or a reduce-scatter and twice that in an all-reduce. Logging,
clipping and the vote on stopping send some hundred bytes and are left out.
"""

# P parameters, D d_model, L layers, V vocab, B sequences per rank and micro-step, T positions

from __future__ import annotations

from gptrain.plan.dims import ParallelDims
from gptrain.plan.shape import DecoderShape

FP32_BYTES = 4


def ring_gather_bytes(n_bytes: float, n_ranks: int) -> float:
    """Sent per rank to gather or reduce-scatter n_bytes: (n-1)/n of them."""
    return n_bytes * (n_ranks - 1) / n_ranks


def ring_all_reduce_bytes(n_bytes: float, n_ranks: int) -> float:
    """Sent per rank to all-reduce n_bytes: a reduce-scatter, then an all-gather."""
    return 2 * ring_gather_bytes(n_bytes, n_ranks)


def ddp_bytes(n_parameters: int, n_ranks: int) -> float:
    """One all-reduce of all gradients, on the last micro-step: 2 (n-1)/n P."""
    return ring_all_reduce_bytes(n_parameters * FP32_BYTES, n_ranks)


def fsdp_bytes(
    shape: DecoderShape,
    n_ranks: int,
    *,
    accumulate: int = 1,
    reshard_after_forward: bool = True,
    accumulate_shards: bool = False,
    n_tensor_ranks: int = 1,
) -> float:
    """Weights gathered in every pass of every micro-step, gradients reduce-scattered in the last.

    With accumulate_shards they are in every micro-step.

    The root's weights stay from forward to backward, a block's only without resharding.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.

    Args:
        n_tensor_ranks: over which most parameters are sharded already.
    """
    blocks, root = shape.tensor_parallel_parameters(n_tensor_ranks)
    passes = 2 if reshard_after_forward else 1
    gathered = accumulate * (passes * blocks + root)
    reduced = (accumulate if accumulate_shards else 1) * (blocks + root)
    return ring_gather_bytes((gathered + reduced) * FP32_BYTES, n_ranks)


def tensor_parallel_bytes(
    shape: DecoderShape,
    n_ranks: int,
    *,
    batch_size: int,
    seq_len: int,
    accumulate: int = 1,
    activation_bytes: int = FP32_BYTES,
    activation_checkpointing: str = "none",
    n_data_ranks: int = 1,
) -> float:
    """Activations between sequence slices and the whole: 4 L + 2 times forward, as often backward.

    Recomputation repeats three of a block's four, all but its last. Besides, three numbers per
    token for the loss, all-reduced, and once a step the gradients of what all ranks hold: norms,
    biases of row-split layers, the position table.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.

    Args:
        n_data_ranks: over which these gradients are sharded, under FSDP.
    """
    padded = -(-seq_len // n_ranks) * n_ranks
    activation = batch_size * padded * shape.d_model * activation_bytes
    n_times = 2 * (4 * shape.n_layers + 2)
    if activation_checkpointing != "none":
        n_times += 3 * shape.n_layers
    micro_step = n_times * ring_gather_bytes(activation, n_ranks)
    micro_step += ring_all_reduce_bytes(3 * FP32_BYTES * batch_size * seq_len, n_ranks)
    replicated = shape.n_layers * shape.block_replicated + shape.root_replicated
    summed = replicated / n_data_ranks * FP32_BYTES
    return accumulate * micro_step + ring_all_reduce_bytes(summed, n_ranks)


def pipeline_bytes(
    shape: DecoderShape,
    n_ranks: int,
    rank: int,
    *,
    batch_size: int,
    seq_len: int,
    accumulate: int = 1,
    stages_per_rank: int = 1,
    activation_bytes: int = FP32_BYTES,
) -> float:
    """Activations to the next stage and their gradients to the one before, for all microbatches.

    The two ends all-reduce the gradient of the weight that they share, once a step.
    """
    if n_ranks == 1:
        return 0.0
    boundaries = 2 * stages_per_rank - (rank == 0) - (rank == n_ranks - 1)
    activation = batch_size * seq_len * shape.d_model * activation_bytes
    tied = 0.0
    if rank in (0, n_ranks - 1):
        tied = ring_all_reduce_bytes(shape.token_table_parameters * FP32_BYTES, 2)
    return accumulate * boundaries * activation + tied


def step_bytes(
    name: str,
    shape: DecoderShape,
    dims: ParallelDims,
    *,
    batch_size: int,
    seq_len: int,
    accumulate: int = 1,
    reshard_after_forward: bool = True,
    accumulate_shards: bool = False,
    activation_checkpointing: str = "none",
    pipeline_rank: int = 0,
    stages_per_rank: int = 1,
) -> float:
    """Bytes that one rank sends in an optimizer step under a strategy, all in fp32.

    Args:
        batch_size: sequences per data rank and micro-step.
        pipeline_rank: place of the rank among the stages.
    """
    work = {"batch_size": batch_size, "seq_len": seq_len, "accumulate": accumulate}
    if "pipeline" in name:
        n_stages = dims.pipeline * stages_per_rank
        held = shape.stage_parameters(range(pipeline_rank, n_stages, dims.pipeline), n_stages)
        place = {"rank": pipeline_rank, "stages_per_rank": stages_per_rank}
        return pipeline_bytes(shape, dims.pipeline, **place, **work) + ddp_bytes(held, dims.data)
    total = 0.0
    if "fsdp" in name:
        total += fsdp_bytes(
            shape,
            dims.data,
            accumulate=accumulate,
            reshard_after_forward=reshard_after_forward,
            accumulate_shards=accumulate_shards,
            n_tensor_ranks=dims.tensor,
        )
    if "tensor" in name:
        total += tensor_parallel_bytes(
            shape,
            dims.tensor,
            activation_checkpointing=activation_checkpointing,
            n_data_ranks=dims.data,
            **work,
        )
    return total or ddp_bytes(shape.n_parameters, dims.data)

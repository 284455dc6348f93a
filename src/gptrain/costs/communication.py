"""What a rank sends in an optimizer step, over which axis, and what overlaps with computation.

Collectives are taken as rings, whose traffic is the least possible (Patarasuk & Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002): of b bytes that each of n ranks holds, or will hold, whole, a rank
sends (n-1)/n b in an all-gather or a reduce-scatter and twice that in an all-reduce. Logging,
clipping and the vote on stopping send some hundred bytes and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

from gptrain.core.strategies import (
    DATA,
    PIPELINE,
    TENSOR,
    DDPOptions,
    DiLoCoOptions,
    ShardedOptions,
    default_options,
)
from gptrain.costs.work import Work


class Traffic(NamedTuple):
    """What a rank sends of one kind in a step.

    Attributes:
        axis: of the mesh, over which.
        calls: collectives.   hops: messages of each that follow each other.
        exposed: fraction that cannot overlap with computation.
        room: fraction of the step's computation that the rest can overlap with.
    """

    what: str
    axis: str
    n_bytes: float
    calls: float
    hops: int = 1
    exposed: float = 1.0
    room: float = 0.0


def gather_bytes(n_bytes: float, n_ranks: int) -> float:
    """Sent per rank to gather or reduce-scatter n_bytes: (n-1)/n of them."""
    return n_bytes * (n_ranks - 1) / n_ranks


def all_reduce_bytes(n_bytes: float, n_ranks: int) -> float:
    """Sent per rank to all-reduce n_bytes: a reduce-scatter, then an all-gather."""
    return 2 * gather_bytes(n_bytes, n_ranks)


def find_traffic(work: Work) -> list[Traffic]:
    """What work.rank sends in a step; nothing on one device."""
    options = work.options
    data = _fsdp(work, options) if isinstance(options, ShardedOptions) else _ddp(work)
    alone = _diloco(work, options) if isinstance(options, DiLoCoOptions) else ()
    found = (*_tensor_parallel(work), *_pipeline(work), *data, *_muon(work), *alone)
    return [traffic for traffic in found if traffic.n_bytes]


def _ddp(work: Work) -> Iterator[Traffic]:
    """One all-reduce of all gradients, by buckets, beside the last micro-step's backward pass.

    A bucket waits for its last gradient, and that of a tied table is the last of all. Pipelines
    average when all is computed. PowerSGD sends gradients whole for its first 1000 steps.
    """
    n, held = work.step_ranks, sum(work.held)
    given = work.options if isinstance(work.options, DDPOptions) else default_options("ddp")
    options = cast(DDPOptions, given)
    each = 2 if options.comm_hook in ("bf16", "fp16") else work.weight_bytes
    bucket = options.bucket_cap_mb * 2**20 / work.weight_bytes  # parameters
    last = max(bucket, work.shape.is_tied * work.shape.table)
    exposed = min(1.0, last / held) if work.dims.pipeline == 1 else 1.0
    sent, n_buckets = all_reduce_bytes(held * each, n), -(-held // bucket)
    room = 2 / 3 / work.accumulate
    yield Traffic("gradients", DATA, sent, n_buckets, 2 * (n - 1), exposed, room)


def _diloco(work: Work, options: DiLoCoOptions) -> Iterator[Traffic]:
    """The change of the replicas' weights, all-reduced every sync_every steps, without overlap.

    Each rank of a replica all-reduces a part of it, which it then broadcasts to the others.
    """
    n, held, parts = work.dims.data // work.step_ranks, sum(work.held), work.step_ranks
    share = 1 / options.sync_every
    each = 2 if options.outer_dtype == "bf16" else work.weight_bytes
    calls = share * (work.shape.n_layers * len(work.shape.matrices) + 3)  # each matrix; the rest
    sent = share * all_reduce_bytes(held * each, n) / parts
    yield Traffic("what replicas moved", DATA, sent, calls / parts, 2 * (n - 1))
    sent = share * gather_bytes(held * work.weight_bytes, parts)
    yield Traffic("what all moved", DATA, sent, calls, parts - 1)


def _fsdp(work: Work, options: ShardedOptions) -> Iterator[Traffic]:
    """Weights gathered in every pass of every micro-step, gradients reduce-scattered in the last.

    With accumulate_shards they are in every micro-step. The root's weights stay from forward to
    backward, a block's only without resharding. Copies of the shards all-reduce their gradients.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.
    """
    (blocks, root), copies, n_blocks = work.held, work.dims.replicas, work.part[0]
    n, whole, each = work.n_shards, blocks + root, work.weight_bytes
    passes = work.accumulate * (2 if options.reshard_after_forward else 1)
    gathered = passes * blocks + work.accumulate * root
    sent, calls = gather_bytes(gathered * work.product_bytes, n), passes * n_blocks + 1
    exposed = work.accumulate * root / gathered
    yield Traffic("weights", DATA, sent, calls, n - 1, exposed, 1.0)
    times = work.accumulate if options.accumulate_shards else 1
    sent, calls = times * gather_bytes(whole * each, n), times * (n_blocks + 1)
    yield Traffic("gradients", DATA, sent, calls, n - 1, root / whole, 1.0)
    sent = times * all_reduce_bytes(whole / n * each, copies)
    yield Traffic("gradients of copies", DATA, sent, calls, 2 * (copies - 1), root / whole, 1.0)


def _tensor_parallel(work: Work) -> Iterator[Traffic]:
    """Activations between sequence slices and the whole: 4 L + 2 times forward, as often backward.

    Recomputation repeats three of a block's four, all but its last. Besides, three numbers per
    token for the loss, all-reduced, and once a step the gradients of what all ranks hold.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    shape, n, (n_blocks, is_first, is_last) = work.shape, work.dims.tensor, work.part
    padded = -(-work.seq_len // n) * n
    times = 2 * (4 * n_blocks + is_first + is_last) + 3 * n_blocks * (work.checkpointing != "none")
    times *= work.accumulate
    sent = times * gather_bytes(work.batch_size * padded * shape.d_model * work.product_bytes, n)
    yield Traffic("activations", TENSOR, sent, times * work.microbatches, n - 1)
    sent = is_last * work.accumulate * all_reduce_bytes(3 * 4 * work.tokens, n)  # fp32
    yield Traffic("loss", TENSOR, sent, work.accumulate, 2 * (n - 1))
    # What the same rank would hold of an endless group.
    whole = shape.parameters(n_blocks, is_first, is_last, 2**62)
    sent = all_reduce_bytes(whole * work.weight_bytes * work.dims.replicas / work.dims.data, n)
    yield Traffic("gradients of norms", TENSOR, sent, 1, 2 * (n - 1))


def _pipeline(work: Work) -> Iterator[Traffic]:
    """Activations to the next stage and their gradients to the one before, for all microbatches.

    The two ends all-reduce the gradient of the weight that they share, once a step.
    """
    n, (_, is_first, is_last), n_tensor = work.dims.pipeline, work.part, work.dims.tensor
    boundaries = work.accumulate * (2 * work.stages_per_rank - is_first - is_last)
    row = work.shape.d_model * max(work.product_bytes, work.weight_bytes) / n_tensor
    yield Traffic("passed on", PIPELINE, boundaries * work.tokens * row, boundaries)
    shared = (n > 1 and work.shape.is_tied and (is_first or is_last)) * work.shape.table
    sent = all_reduce_bytes(shared / n_tensor * work.weight_bytes, 2)
    yield Traffic("the tied gradient", PIPELINE, sent, 1, 2)


def _muon(work: Work) -> Iterator[Traffic]:
    """Yield the traffic of Muon's updates, whose work the ranks divide; in bf16 or else in fp32.

    Ranks that hold full matrices all-gather the updates. Shards are sent to the rank that updates
    their matrix, and the updates are sent back. NCCL sends each rank its part alone. Gloo cannot do
    that, and all-gathers full matrices both times. Copies of the shards (HSDP) have nothing to send
    to each other before the update, and all-gather its shards afterwards.
    """
    dims, is_sharded = work.dims, work.has_fsdp or work.dims.tensor > 1
    n, each, times = work.muon_ranks, work.is_muon * (2 if work.has_bf16 else 4), 1 + is_sharded
    parts = work.shape.muon_parts(work.part[0], n)
    updates = each * n * sum(short * long * number for short, long, number in parts)
    if is_sharded:
        matrices, n_copies = each * work.part[0] * work.shape.block_matrices, dims.replicas
        n_of_copy = n // n_copies  # ranks that hold the shards of one copy
        if work.is_cpu:
            sent = gather_bytes(matrices, n_of_copy) + gather_bytes(updates, n)
        else:
            sent = gather_bytes(matrices + updates, n_of_copy) / n
            sent += gather_bytes(updates / n_of_copy, n_copies)
    else:
        sent = gather_bytes(updates, n)
    shapes = len(parts) + (dims.tensor > 1)  # out_proj's shards
    yield Traffic("updates of Muon", DATA if dims.data > 1 else TENSOR, sent, times * shapes, n - 1)

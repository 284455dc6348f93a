"""What a rank sends in an optimizer step, over which axis, and how long that takes.

Collectives are taken as rings, whose traffic is the least possible (Patarasuk & Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002): of b bytes that each of n ranks holds, or will hold, whole, a rank
sends (n-1)/n b in an all-gather or a reduce-scatter and twice that in an all-reduce. Logging,
clipping and the vote on stopping send some hundred bytes and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptrain.plan.dims import DATA, PIPELINE, TENSOR
from gptrain.plan.hardware import Link
from gptrain.plan.work import Work

HOOK_BYTES = {"bf16": 2, "fp16": 2}  # of a gradient; powersgd sends it whole for 1000 steps


@dataclass(frozen=True)
class Traffic:
    """What a rank sends of one kind in a step.

    Attributes:
        axis: of the mesh, over which.   rounds: messages that follow each other.
        exposed: fraction that is sent when nothing is left to compute beside it.
        beside: "backward" of the last micro-step, "all" computation, or "" nothing hides the rest.
    """

    what: str
    axis: str
    n_bytes: float
    rounds: float
    exposed: float = 1.0
    beside: str = ""


def gather_bytes(n_bytes: float, n_ranks: int) -> float:
    """Sent per rank to gather or reduce-scatter n_bytes: (n-1)/n of them."""
    return n_bytes * (n_ranks - 1) / n_ranks


def all_reduce_bytes(n_bytes: float, n_ranks: int) -> float:
    """Sent per rank to all-reduce n_bytes: a reduce-scatter, then an all-gather."""
    return 2 * gather_bytes(n_bytes, n_ranks)


def naive_exchange_bytes(n_bytes: float, n_ranks: int) -> float:
    """On the wire, over all ranks, where each sends its whole tensor to every other: n (n-1) b."""
    return n_ranks * (n_ranks - 1) * n_bytes


def all_reduce_seconds(n_bytes: float, n_ranks: int, link: Link) -> float:
    """Time of one ring all-reduce.

    2(n-1) messages of n_bytes/n:  t = 2(n-1) * (latency + n_bytes / (n * bandwidth)).
    Exact for a ring of equal links; an upper bound where NCCL picks a tree (small messages).

    Args:
        n_bytes: tensor on each rank, bytes.   link: slowest of the ring; bytes/s one way, s.
    Raises: ValueError if n_ranks < 1.
    Source: Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002
    """
    if n_ranks < 1:
        raise ValueError(f"n_ranks={n_ranks}: need at least 1")
    rounds = 2 * (n_ranks - 1)
    return rounds * link.latency_s + all_reduce_bytes(n_bytes, n_ranks) / link.bytes_per_s


def find_traffic(work: Work) -> list[Traffic]:
    """All that a rank sends in a step; nothing on one device."""
    data = _fsdp if "fsdp" in work.strategy else _ddp
    found = (*_tensor_parallel(work), *_pipeline(work), *data(work))
    return [traffic for traffic in found if traffic.n_bytes]


def sent_bytes(work: Work) -> float:
    """Bytes that a rank sends in a step."""
    return sum(traffic.n_bytes for traffic in find_traffic(work))


def _ddp(work: Work) -> Iterator[Traffic]:
    """One all-reduce of all gradients, bucket by bucket, beside the last micro-step's backward.

    A bucket waits for its last gradient, and that of a tied table is the last of all. Pipelines
    average when all is computed.
    """
    n, held = work.dims.data, work.held()
    each = HOOK_BYTES.get(work.options.get("comm_hook", ""), work.weight_bytes)
    bucket = work.options.get("bucket_cap_mb", 25.0) * 2**20 / work.weight_bytes  # parameters
    last = max(bucket, work.shape.is_tied * work.shape.table)
    exposed = min(1.0, last / held) if work.dims.pipeline == 1 else 1.0
    sent, rounds = all_reduce_bytes(held * each, n), 2 * (n - 1) * -(-held // bucket)
    yield Traffic("gradients", DATA, sent, rounds, exposed, "backward")


def _fsdp(work: Work) -> Iterator[Traffic]:
    """Weights gathered in every pass of every micro-step, gradients reduce-scattered in the last.

    With accumulate_shards they are in every micro-step. The root's weights stay from forward to
    backward, a block's only without resharding. Copies of the shards all-reduce their gradients.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.
    """
    blocks, root = work.held(root=False), work.held(blocks=False)
    copies, n_units = work.dims.replicas, work.part[0] + 1
    n, whole = work.dims.data // copies, blocks + root
    passes = 2 if work.options.get("reshard_after_forward", True) else 1
    times = work.accumulate if work.options.get("accumulate_shards") else 1
    gathered = passes * blocks + root
    sent = work.accumulate * gather_bytes(gathered * work.product_bytes, n)
    rounds = work.accumulate * (passes * (n_units - 1) + 1) * (n - 1)
    yield Traffic("weights", DATA, sent, rounds, root / gathered, "all")
    sent = times * gather_bytes(whole * work.weight_bytes, n)
    yield Traffic("gradients", DATA, sent, times * n_units * (n - 1), root / whole, "all")
    sent = times * all_reduce_bytes(whole / n * work.weight_bytes, copies)
    rounds = 2 * times * n_units * (copies - 1)
    yield Traffic("gradients of copies", DATA, sent, rounds, root / whole, "all")


def _tensor_parallel(work: Work) -> Iterator[Traffic]:
    """Activations between sequence slices and the whole: 4 L + 2 times forward, as often backward.

    Recomputation repeats three of a block's four, all but its last. Besides, three numbers per
    token for the loss, all-reduced, and once a step the gradients of what all ranks hold: norms,
    biases of row-split layers, the position table.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    n, accumulate, (n_blocks, is_first, is_last) = work.dims.tensor, work.accumulate, work.part
    padded = -(-work.seq_len // n) * n
    activation = work.batch_size * padded * work.shape.d_model * work.product_bytes
    times = 2 * (4 * n_blocks + is_first + is_last)
    times += 3 * n_blocks * (work.checkpointing != "none")
    sent = accumulate * times * gather_bytes(activation, n)
    yield Traffic("activations", TENSOR, sent, accumulate * times * (n - 1) * work.microbatches)
    sent = is_last * accumulate * all_reduce_bytes(3 * 4 * work.tokens, n)  # fp32
    yield Traffic("loss", TENSOR, sent, 2 * accumulate * (n - 1))
    tables = (is_first + (is_last and not (is_first and work.shape.is_tied))) * work.shape.table
    whole = work.held(blocks=False) - tables / n + n_blocks * work.shape.block_replicated
    shards = work.dims.data // work.dims.replicas
    sent = all_reduce_bytes(whole / shards * work.weight_bytes, n)
    yield Traffic("gradients of norms", TENSOR, sent, 2 * (n - 1))


def _pipeline(work: Work) -> Iterator[Traffic]:
    """Activations to the next stage and their gradients to the one before, for all microbatches.

    The two ends all-reduce the gradient of the weight that they share, once a step.
    """
    n, (_, is_first, is_last) = work.dims.pipeline, work.part
    if n == 1:
        return
    boundaries = 2 * work.stages_per_rank - is_first - is_last
    row = work.shape.d_model * max(work.product_bytes, work.weight_bytes)
    sent = work.accumulate * boundaries * work.tokens * row / work.dims.tensor
    yield Traffic("activations passed on", PIPELINE, sent, work.accumulate * boundaries)
    if work.shape.is_tied and (is_first or is_last):
        sent = all_reduce_bytes(work.shape.table / work.dims.tensor * work.weight_bytes, 2)
        yield Traffic("the tied gradient", PIPELINE, sent, 2)

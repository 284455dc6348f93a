"""Memory, traffic and time of an optimizer step of one rank. All formulas of the planner are here.

A strategy is the sizes of four axes and its options: the formulas are sums over the axes. Bytes are
bytes, times are seconds. The memory is that of tensors on a GPU: the CUDA context and the
fragmentation of the allocator come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gptrain.core import strategies
from gptrain.core.lengths import loss_rows
from gptrain.core.precision import TYPE_BYTES, find_precision
from gptrain.core.strategies import CONTEXT, DATA, PIPELINE, TENSOR, ParallelDims
from gptrain.costs.hardware import Link, Machine
from gptrain.costs.net import Net, train_flops_per_token


@dataclass(frozen=True)
class Step:
    """Facts about an optimizer step of one rank, from which all estimates follow.

    Attributes:
        net: Sizes of the net.
        options: Options of the strategy, with the type of its row in STRATEGIES.
        dims: Number of ranks along each axis of the device mesh.
        batch_size: Sequences per data rank and micro-step.
        seq_len: Tokens per sequence.
        accumulate: Micro-steps per optimizer step.
        precision: Precision as Lightning names it, such as "bf16-mixed".
        states: Values that the optimizer stores per weight of a block's matrices, and per other
            parameter (`optimizer_states`).
        checkpointing: "none", "selective" or "full", the activations that a block recomputes.
        compile: "none", "blocks" or "model", the parts of the net that are compiled.
        dropout: Probability of dropout.
        rank: Index of the rank in its pipeline.
    """

    net: Net
    options: strategies.StrategyOptions
    dims: ParallelDims
    batch_size: int
    seq_len: int
    accumulate: int = 1
    precision: str = "32-true"
    states: tuple[float, float] = (2, 2)
    checkpointing: str = "none"
    compile: str = "none"
    dropout: float = 0.0
    rank: int = 0

    @property
    def sharded(self) -> strategies.ShardedOptions | None:
        """Options of FSDP if ranks store shards of the weights, else None."""
        return self.options if isinstance(self.options, strategies.ShardedOptions) else None

    @property
    def n_shards(self) -> int:
        """Number of FSDP shards of weights, gradients and optimizer states. 1 without FSDP."""
        return self.dims.gradient_ranks // self.dims.replicas if self.sharded else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes per parameter. Mixed precision keeps fp32 weights."""
        return TYPE_BYTES[find_precision(self.precision).weights]

    @property
    def matmul_bytes(self) -> int:
        """Bytes per element of the inputs of a matrix multiplication."""
        return TYPE_BYTES[find_precision(self.precision).matmul]

    @property
    def is_mixed(self) -> bool:
        """True if matrices multiply 16-bit copies of fp32 weights."""
        return self.matmul_bytes < self.weight_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes per token of the residual stream.

        Its type is that of `matmul_bytes` under FSDP, and else that of the weights.
        """
        return self.net.d_model * (self.matmul_bytes if self.sharded else self.weight_bytes)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a micro-step in a pipeline. 1 without a pipeline."""
        if not isinstance(self.options, strategies.PipelineOptions) or self.dims.pipeline == 1:
            return 1
        return strategies.count_microbatches(self.options.microbatches, self.dims.pipeline)

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-step on one rank. A context group divides and pads every sequence."""
        return self.batch_size * -(-self.seq_len // self.dims.context)

    @property
    def d_kv(self) -> int:
        """Width of all key heads, which are repeated until the context ranks divide them."""
        n_ranks = self.dims.context
        return self.net.d_kv * (n_ranks // math.gcd(self.net.n_kv_heads, n_ranks))

    @property
    def part(self) -> tuple[int, bool, bool]:
        """Number of blocks of the rank, whether it has the first stage, whether it has the last."""
        n_stages = self.dims.pipeline
        n_blocks = len(strategies.stage_blocks(self.rank, n_stages, self.net.n_layers))
        return n_blocks, self.rank == 0, self.rank == n_stages - 1

    @property
    def held(self) -> tuple[float, float]:
        """Number of the rank's parameters in blocks, and of those outside, before FSDP shards them.

        The padding that makes all shards of a tensor equally large is left out.
        """
        n_blocks, *ends = self.part
        blocks = self.net.parameters(n_blocks, False, False, self.dims.tensor)
        return blocks, self.net.parameters(0, *ends, self.dims.tensor)

    @property
    def ends(self) -> list[Step]:
        """The same step on the first and the last rank of a pipeline. One without a pipeline."""
        return [replace(self, rank=rank) for rank in sorted({0, self.dims.pipeline - 1})]


# Memory


def memory(step: Step) -> dict[str, float]:
    """Return the bytes of each part of a rank's memory, and in `total` the peak during a step.

    The total is at most the sum of the parts, because activations are freed while gradients are
    allocated. Weights, gradients and optimizer states are exact if the ranks divide the sizes.

    Returns:
        {"weights", "gradients", "optimizer", "activations", "logits", "buffers", "total"} in bytes.
        "buffers" are gathered weights, 16-bit copies, and the tensors that exist during the
        backward pass of one block.
    """
    net, n_tensor = step.net, step.dims.tensor
    n_blocks, _, is_last = step.part
    blocks, root = step.held
    matrices, table = n_blocks * net.block_matrices / n_tensor, net.table / n_tensor
    of_matrices, of_others = step.states
    n_states = of_matrices * matrices + of_others * (blocks + root - matrices)
    numbers = {"weights": blocks + root, "gradients": blocks + root, "optimizer": n_states}
    parts = {name: n * step.weight_bytes / step.n_shards for name, n in numbers.items()}
    gradients = parts["gradients"]
    tokens = step.rank_tokens / step.microbatches
    kept_per_token, recomputed_per_token = activations(step)

    # GPipe holds all microbatches. 1F1B holds those whose forward passes the rank runs before its
    # first backward pass: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    n_live = step.microbatches
    if getattr(step.options, "schedule", "gpipe") == "1f1b":
        n_live = min(n_live, step.dims.pipeline - step.rank)
    activation_bytes = tokens * n_blocks * kept_per_token * n_live

    # Logits of one chunk of the loss, and the gradient of the head. Mixed precision adds logits in
    # 16 bits, and a 16-bit copy of the head and of its gradient.
    logits = head = 0.0
    if is_last:
        logits = min(loss_rows("cuda"), tokens) * net.vocab_size / n_tensor * 4
        logits = 1.5 * logits + 4 * table if step.is_mixed else logits
        head = table * step.weight_bytes

    # `early`: gradients that exist during a forward pass. `copies`: weights that FSDP has gathered,
    # or 16-bit copies of autocast. `in_block`: full gradients of a block on their way to shards.
    is_stored = step.accumulate > 1 or step.microbatches > 1
    in_block = 0.0
    if step.sharded:
        early = gradients if is_stored else 0.0
        if step.accumulate > 1 and not step.sharded.accumulate_shards:
            early = (blocks + root) * step.weight_bytes
        # With resharding FSDP gathers a block while the block before it computes.
        share = min(1, 2 / n_blocks) if step.sharded.reshard_after_forward else 1
        copies = (root + share * blocks) * step.matmul_bytes
        in_block = blocks / n_blocks * (step.matmul_bytes + step.weight_bytes)
    else:
        early = gradients if is_stored or step.dims.gradient_ranks > 1 else 0.0
        is_copied = step.is_mixed and step.checkpointing != "full"
        copies = 2 * matrices if is_copied else 0.0

    # Tensors that exist during the backward pass of one block. A tensor group gathers sequences and
    # copies them into the order of time.
    inner = net.n_up * net.d_ff + (net.d_model if step.is_mixed and not step.sharded else 0)
    per_token = recomputed_per_token + (step.row_bytes + inner * step.matmul_bytes) / n_tensor
    per_token += 4 * net.d_model * step.matmul_bytes if n_tensor > 1 else 0
    block = tokens * per_token
    first_block = max(early, gradients) + tokens * kept_per_token + block + in_block
    before_backward = early + head + activation_bytes
    peak = copies + max(before_backward + max(logits, block), first_block)
    parts |= {"activations": activation_bytes, "logits": logits}
    parts["buffers"] = max(copies + block, peak - gradients - activation_bytes - logits)
    return parts | {"total": parts["weights"] + parts["optimizer"] + peak}


def activations(step: Step) -> tuple[float, float]:
    """Return the bytes that a block keeps for its backward pass, and that it recomputes.

    Both are those of one rank, per token of the rank.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.
    """
    # Without activation checkpointing a block keeps the inputs of both norms, the inputs of its
    # matrices, q, k, v and the output of the attention, the values inside the MLP, and the
    # statistics of norms and softmax. "selective" keeps the outputs of matrices, "full" the input
    # of the block.
    net, n_tensor, n_bytes = step.net, step.dims.tensor, step.matmul_bytes
    is_cast = step.is_mixed and not step.sharded
    is_fp32_norm = step.is_mixed and net.has_biases  # autocast computes LayerNorm in fp32
    norms = 2 * (4 * net.d_model if is_fp32_norm else step.row_bytes) / n_tensor + 16
    # Inputs of q, k, v and up (and gate): each its own copy under autocast, else one per norm.
    normed = (3 + net.n_up if is_cast or is_fp32_norm else 2) * net.d_model * n_bytes
    # q, the output of the attention, k, v, and the fp32 logsumexp of each head. Grouped k and v are
    # repeated in fp32.
    width = 2 * net.d_q + 2 * (net.d_q if n_bytes == 4 else net.d_kv)
    attention = (width * n_bytes + 4 * net.n_heads) / n_tensor
    # torch.compile computes the activation function again instead of keeping its result.
    inner = net.n_up * net.d_ff * n_bytes / n_tensor
    everything = norms + normed + attention + inner * (2 if step.compile == "none" else 1)
    if step.dims.context > 1:  # the output of attention before its exchange, repeated k and v
        everything += (net.d_q + 2 * (step.d_kv - net.d_kv)) * n_bytes
    if step.dropout:  # two masks of one byte
        everything += 2 * net.d_model / n_tensor
    if net.has_qk_norm:
        everything += (net.d_q + net.d_kv) * n_bytes / n_tensor
    if step.checkpointing == "none":
        return everything, 0.0
    kept = step.row_bytes / n_tensor
    if step.checkpointing == "selective":
        outputs = 2 * net.d_model * n_bytes / n_tensor  # of out and down
        kept += attention + inner + outputs
        everything += outputs
    return kept, max(0.0, everything - kept)


# Traffic


class _Traffic(NamedTuple):
    """The data of one kind, such as gradients, that a rank sends in an optimizer step.

    Attributes:
        what: Kind of the data, for the output of the planner.
        axis: Axis of the device mesh.
        n_bytes: Bytes that one rank sends over the axis, in `calls` collectives.
        hops: Number of messages of one collective that follow each other.
        exposed: Fraction of the traffic that cannot overlap with computation.
        overlap: Fraction of the step's computation during which the rest can be sent.
    """

    what: str
    axis: str
    n_bytes: float
    calls: float
    hops: int = 1
    exposed: float = 1.0
    overlap: float = 0.0


def _gather_bytes(n_bytes: float, n_ranks: int) -> float:
    """Return the bytes that a rank sends to all-gather or reduce-scatter `n_bytes` around a ring.

    Source: Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002
    """
    return n_bytes * (n_ranks - 1) / n_ranks


def find_traffic(step: Step) -> Iterator[_Traffic]:
    """Yield each kind of traffic that a rank sends in an optimizer step. It may have 0 bytes."""
    net, dims = step.net, step.dims
    n_blocks, is_first, is_last = step.part
    n_ends = [is_first, is_last].count(True)

    # A tensor group gathers or reduce-scatters the activations 4 L + 2 times in the forward pass of
    # L layers, and as often in the backward pass. Recomputation repeats three of a block's four
    # exchanges. Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    is_recomputed = step.checkpointing != "none"
    exchanges = step.accumulate * (n_blocks * (11 if is_recomputed else 8) + 2 * n_ends)
    tokens = step.batch_size * -(-step.seq_len // dims.tensor) * dims.tensor
    sent = exchanges * _gather_bytes(tokens * net.d_model * step.matmul_bytes, dims.tensor)
    yield _Traffic("activations", TENSOR, sent, exchanges, dims.tensor - 1)

    # Each block exchanges q, k and v in one all-to-all and the output of attention in another.
    # Jacobs et al. 2023, arXiv:2309.14509, section 3.2.
    passes = step.accumulate * n_blocks * (3 if is_recomputed else 2)
    heads = step.rank_tokens * 2 * (net.d_q + step.d_kv) * step.matmul_bytes
    yield _Traffic("heads", CONTEXT, passes * _gather_bytes(heads, dims.context), 2 * passes)

    # A stage sends activations to the next stage and their gradients to the previous one. The first
    # and the last stage have one neighbour, and share the gradient of a tied token table.
    if dims.pipeline > 1:
        sends = step.accumulate * (2 - n_ends)
        row_bytes = net.d_model * max(step.matmul_bytes, step.weight_bytes)
        yield _Traffic("activations", PIPELINE, sends * step.rank_tokens * row_bytes, sends)
        tied = net.table * step.weight_bytes if net.is_tied and n_ends else 0
        yield _Traffic("gradient of the tied weight", PIPELINE, tied, 1, 2)
    yield from _weight_traffic(step)


def _weight_traffic(step: Step) -> Iterator[_Traffic]:
    """Yield the traffic of weights and gradients (Rajbhandari et al. 2020, arXiv:1910.02054)."""
    blocks, root = step.held
    total, n_blocks = blocks + root, step.part[0]
    if options := step.sharded:
        # Every micro-step gathers the weights outside of blocks once, and those of each block once,
        # or twice with `reshard_after_forward`. Gradients are reduced in the last micro-step, or in
        # every one with `accumulate_shards`, and then summed over copies of the shards.
        n_shards, n_copies = step.n_shards, step.dims.replicas
        gathers = step.accumulate * (2 if options.reshard_after_forward else 1)
        gathered = gathers * blocks + step.accumulate * root
        sent = _gather_bytes(gathered * step.matmul_bytes, n_shards)
        exposed = step.accumulate * root / gathered
        yield _Traffic("weights", DATA, sent, gathers * n_blocks + 1, n_shards - 1, exposed, 1.0)
        reductions = step.accumulate if options.accumulate_shards else 1
        calls, exposed = reductions * (n_blocks + 1), root / total
        sent = reductions * _gather_bytes(total * step.weight_bytes, n_shards)
        yield _Traffic("gradients", DATA, sent, calls, n_shards - 1, exposed, 1.0)
        sent = 2 * reductions * _gather_bytes(total / n_shards * step.weight_bytes, n_copies)
        hops = 2 * (n_copies - 1)
        yield _Traffic("gradients of copies", DATA, sent, calls, hops, exposed, 1.0)
        return
    # One all-reduce, bucket by bucket, during the last backward pass, which is two thirds of a
    # micro-step. A bucket waits for its last gradient, and the gradient of a tied table is the last
    # of all. Pipelines average after all passes. PowerSGD sends full gradients at first.
    is_ddp = isinstance(step.options, strategies.DDPOptions)
    options: Any = step.options if is_ddp else strategies.default_options("ddp")
    value_bytes = 2 if options.comm_hook in ("bf16", "fp16") else step.weight_bytes
    bucket = options.bucket_cap_mb * 2**20 / step.weight_bytes  # parameters per bucket
    last_bucket = max(bucket, step.net.table) if step.net.is_tied else bucket
    exposed = 1.0 if step.dims.pipeline > 1 else min(1.0, last_bucket / total)
    sent = 2 * _gather_bytes(total * value_bytes, step.dims.gradient_ranks)
    calls, hops = -(-total // bucket), 2 * (step.dims.gradient_ranks - 1)
    yield _Traffic("gradients", DATA, sent, calls, hops, exposed, overlap=2 / 3 / step.accumulate)


def _find_link(traffic: _Traffic, dims: ParallelDims, machine: Machine) -> Link:
    """Return the link that limits a kind of traffic: that of the ring of the ranks of its axis.

    A ring within one node takes the machine's `link`, or `host` if it spans more devices than
    `link` joins. A ring over several nodes leaves a node through the network cards of its ranks
    there.
    """
    n_ranks = dims.gradient_ranks if traffic.axis == DATA else getattr(dims, traffic.axis)
    # Distance of two neighbours of the ring, in ranks.
    stride = {DATA: dims.tensor, PIPELINE: dims.data * dims.tensor}.get(traffic.axis, 1)
    n_on_node = max(1, machine.n_local // stride)
    link, network = machine.link, machine.network
    if machine.host is not None and machine.island < stride * min(n_on_node, n_ranks):
        link = machine.host
    if n_on_node >= n_ranks:
        return link
    bandwidth = min(link.bytes_per_s, n_on_node * network.bytes_per_s)
    return Link(network.name, bandwidth, network.latency_s / n_on_node)


# Time

# Number of times that each kept activation is read or written, without and with torch.compile, and
# that each logit and each byte of a parameter is. All were counted in SimpleGPT and Llama.
_MOVES, _COMPILED_MOVES, _PER_LOGIT, _PER_PARAMETER = 7, 3, 10, 10
# Calls of torch operations of a block and of the rest of a microbatch, and the seconds that a CPU
# needs to launch one of them on a GPU.
_BLOCK_CALLS, _STEP_CALLS, _CALL_S = 60, 150, 5e-6
_TIMES = ("step_s", "communication_s", "overlapped_s", "tokens_per_s", "mfu", "scaling_efficiency")


def estimate(step: Step, machine: Machine) -> dict[str, Any]:
    """Return the memory, FLOPs, traffic and time of an optimizer step.

    The memory is that of the rank that needs most, the traffic that of the rank that sends most.
    FLOPs are those of one rank on average. Computation is a roofline: FLOPs at the speed of matrix
    multiplications, and the bytes of all other operations at the bandwidth of the memory.

    Args:
        step: Facts about the optimizer step of any rank of the run.
        machine: Machine on which the ranks run. With more ranks than `machine.n_local` the run uses
            several such nodes.

    Returns:
        bytes_per_device: Bytes of each part of the memory (`memory`).
        fits: True if the memory is large enough.
        flops: FLOPs of the model, without recomputation and the update.
        recomputed_flops: FLOPs that activation checkpointing adds.
        wire_bytes_per_step: Bytes that the rank sends.
        wire: "kind, axis, link" -> bytes, the same bytes by kind. Kinds of 0 bytes are missing.
        step_s: Seconds of a step. This and all values below are None on a CPU.
        communication_s: Seconds of all communication.
        overlapped_s: Seconds of communication that overlap with computation.
        tokens_per_s: Tokens of all ranks per second.
        mfu: Model FLOPs utilization: `flops` / `step_s`, over the peak of the data sheet.
        scaling_efficiency: Fraction of the step in which the rank neither waits in a pipeline nor
            for communication.
    """
    net, dims = step.net, step.dims
    held = max(map(memory, step.ends), key=lambda parts: parts["total"])
    # FLOPs of one rank on average. "full" repeats the forward pass, a third of all FLOPs, without
    # the head and the last matrix of each MLP, whose output is not needed. "selective" repeats no
    # matrix.
    step_tokens = step.batch_size * step.seq_len * step.accumulate * dims.data
    tokens = step_tokens / dims.world_size
    attention = tokens * train_flops_per_token(0, net.n_layers, net.d_q, step.seq_len)
    flops = attention + tokens * train_flops_per_token(net.matrix_weights, 0, 0, 0)
    head = 6 * tokens * net.table
    down = 6 * tokens * net.n_layers * net.d_model * net.d_ff
    recomputed = (flops - head - down) / 3 if step.checkpointing == "full" else 0.0

    all_traffic = [[*find_traffic(end)] for end in step.ends]
    entries = max(all_traffic, key=lambda sent: sum(entry.n_bytes for entry in sent))
    links = {entry: _find_link(entry, dims, machine) for entry in entries if entry.n_bytes}
    wire = {f"{e.what}, {e.axis} axis, {link.name}": round(e.n_bytes) for e, link in links.items()}
    row = {
        "bytes_per_device": {name: round(n_bytes) for name, n_bytes in held.items()},
        "fits": held["total"] <= machine.memory_bytes,
        "flops": round(flops),
        "recomputed_flops": round(recomputed),
        "wire_bytes_per_step": sum(wire.values()),
        "wire": wire,
    }
    if not machine.flops_per_s:
        return row | dict.fromkeys(_TIMES)

    # A type without instructions, and fp64, have the speed of fp32. Matrices of fp32 are multiplied
    # in TF32 if the device has it, because train.py allows TF32.
    dtype, speeds = find_precision(step.precision).matmul, machine.flops_per_s
    peak = speeds.get("tf32" if dtype == "float32" else dtype, speeds["float32"])
    # The longer time of attention counts as FLOPs. The last stage has the head as well.
    attention *= 4 / 3 if recomputed else 1
    stage_flops = flops + recomputed + attention * (1 / machine.attention - 1)
    stage_flops += head * (dims.pipeline - 1)
    # Recomputation repeats the forward pass, which is half of the elementwise work.
    repeats = 1.5 if step.checkpointing != "none" else 1.0
    moves = repeats * net.n_layers * (_MOVES if step.compile == "none" else _COMPILED_MOVES)
    kept = activations(replace(step, checkpointing="none", compile="none"))[0]
    per_token = moves * kept + _PER_LOGIT * 4 * net.vocab_size / dims.tensor
    moved_bytes = step.rank_tokens * step.accumulate / dims.pipeline * per_token
    moved_bytes += _PER_PARAMETER * held["weights"]
    calls = repeats * _BLOCK_CALLS * net.n_layers / dims.pipeline + _STEP_CALLS
    call_s = step.accumulate * step.microbatches * calls * _CALL_S
    busy_s = max(stage_flops / peak + moved_bytes / machine.memory_bytes_per_s, call_s)
    # Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    idle_s = busy_s * (dims.pipeline - 1) / step.microbatches

    # Traffic with the same overlap shares the time of the same computation.
    seconds = {
        e: e.calls * e.hops * n.latency_s + e.n_bytes / n.bytes_per_s for e, n in links.items()
    }
    sent_s, shown_s = sum(seconds.values()), 0.0
    for overlap in {entry.overlap for entry in seconds}:
        all_s = sum(s for entry, s in seconds.items() if entry.overlap == overlap)
        least_s = sum(s * entry.exposed for entry, s in seconds.items() if entry.overlap == overlap)
        shown_s += max(least_s, all_s - overlap * busy_s)
    step_s = busy_s + idle_s + shown_s
    speed, mfu = step_tokens / step_s, flops / step_s / peak * machine.matmul
    times = step_s, sent_s, sent_s - shown_s, speed, mfu, busy_s / step_s
    return row | dict(zip(_TIMES, times, strict=True))

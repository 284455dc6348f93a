"""Time of an optimizer step: a roofline of computation, and the communication that it cannot hide.

Computation takes the FLOPs divided by the speed of matrix multiplications, and the bytes of all
other operations divided by the bandwidth of the memory. All times are in seconds.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from gptrain.core.precision import find_precision
from gptrain.core.strategies import CONTEXT, PIPELINE, TENSOR, ParallelDims
from gptrain.costs.communication import Traffic, find_traffic
from gptrain.costs.flops import train_flops_per_token
from gptrain.costs.hardware import Link
from gptrain.costs.machine import Machine
from gptrain.costs.memory import block_activations, estimate_memory
from gptrain.costs.work import Work


class StepOverhead(NamedTuple):
    """Work of a step in addition to its matrix multiplications.

    Attributes:
        plain: Number of times that each kept activation is read or written, without torch.compile.
        compiled: The same number with torch.compile.
        per_logit: Number of times that each logit is read or written.
        per_parameter: Number of times that each parameter is read or written.
        block_calls: Number of calls of torch operations for each block and microbatch.
        step_calls: Number of calls for the rest of each microbatch.
    """

    plain: int
    compiled: int
    per_logit: int
    per_parameter: int
    block_calls: int
    step_calls: int


# The values for GPUs were counted in SimpleGPT and Llama. The values for CPUs, whose elementwise
# operations are not limited by memory alone, were fitted to measured runs (tests/plan_accuracy.py).
ON_GPU = StepOverhead(7, 3, per_logit=10, per_parameter=10, block_calls=60, step_calls=150)
ON_CPU = StepOverhead(33, 18, per_logit=16, per_parameter=40, block_calls=450, step_calls=100)
TIMES = ("step_s", "communication_s", "overlapped_s", "tokens_per_s", "mfu", "scaling_efficiency",
         "hours", "device_hours")  # fmt: skip


def estimate(work: Work, machine: Machine) -> dict[str, Any]:
    """Return the memory, FLOPs, traffic and time of an optimizer step.

    The memory is that of the rank that needs most, the traffic that of the rank that sends most.
    FLOPs are those of one rank on average.

    Args:
        work: Facts about the optimizer step of any rank of the run.
        machine: Machine on which the ranks run.

    Returns:
        bytes_per_device: Bytes of each part of the memory (`estimate_memory`).
        fits: True if the memory is large enough.
        step_s: Seconds of a step.
        flops: FLOPs of the model, without recomputation and the update.
        recomputed_flops: FLOPs that activation checkpointing adds.
        optimizer_flops: FLOPs of the update beyond its elementwise work.
        wire_bytes_per_step: Bytes that the rank sends.
        wire: The same bytes by kind, axis and link.
        communication_s: Seconds of all communication.
        overlapped_s: Seconds of communication that overlap with computation.
        tokens_per_s: Tokens of all ranks per second.
        mfu: Model FLOPs utilization: `flops` / `step_s`, over the peak of the data sheet, or over
            the measured speed of a CPU.
        scaling_efficiency: Fraction of the step in which the rank neither waits in a pipeline nor
            for communication.
    """
    memory = max(map(estimate_memory, work.ends), key=lambda sizes: sizes["total"])
    n_stages = work.dims.pipeline
    n_ranks = work.dims.world_size

    # FLOPs of one rank on average.
    attention_sizes = (work.shape.n_layers, work.shape.d_q, work.seq_len)
    flops_per_token = train_flops_per_token(work.shape.matrix_weights, *attention_sizes)
    flops = work.step_tokens * flops_per_token / n_ranks
    attention = work.step_tokens * train_flops_per_token(0, *attention_sizes) / n_ranks
    flops_per_weight = 6 * work.step_tokens / n_ranks
    head = flops_per_weight * work.shape.table
    recomputed = 0.0
    attention_passes = 1.0
    if work.checkpointing == "full":
        # The forward pass, a third of all FLOPs, runs again: without the head, and without the
        # last matrix of each MLP, whose output is not needed. "selective" repeats no matrix.
        down = flops_per_weight * work.shape.n_layers * work.shape.d_model * work.shape.d_ff
        recomputed = (flops - head - down) / 3
        attention_passes = 4 / 3
    # FLOPs that matrix multiplications would do in the time that attention takes longer.
    attention_delay = attention_passes * attention * (1 / machine.efficiency.attention - 1)
    update = work.optimizer.flops(work)

    # Time of computation. The last stage of a pipeline has the head in addition to its blocks.
    peak = matmul_flops_per_s(work, machine)
    moved_s = moved_bytes(work, machine, memory["weights"]) / machine.memory_bytes_per_s
    stage_flops = flops + recomputed + attention_delay + head * (n_stages - 1)
    busy_s = stage_flops / peak + moved_s
    call_s = operation_calls(work, machine) * machine.op_s
    # A GPU computes while the CPU calls the next operations.
    busy_s = busy_s + call_s if machine.is_cpu else max(busy_s, call_s)
    # Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    idle_s = busy_s * (n_stages - 1) / (work.microbatches * work.costs.stages_per_rank)
    update_speed = max(machine.flops_per_s["float32"], machine.flops_per_s.get("bfloat16", 0))
    update_s = update / update_speed

    wire, communication_s, exposed_s = communicate(work, machine, busy_s)
    step_s = busy_s + idle_s + update_s + exposed_s
    return {
        "bytes_per_device": {name: round(n_bytes) for name, n_bytes in memory.items()},
        "fits": machine.has_memory_for(memory["total"]),
        "step_s": step_s,
        "flops": round(flops),
        "recomputed_flops": round(recomputed),
        "optimizer_flops": round(update),
        "wire_bytes_per_step": sum(wire.values()),
        "wire": wire,
        "communication_s": communication_s,
        "overlapped_s": communication_s - exposed_s,
        "tokens_per_s": work.step_tokens / step_s,
        "mfu": flops / step_s / peak * machine.efficiency.matmul,
        "scaling_efficiency": 1 - (idle_s + exposed_s) / step_s,
    }


def matmul_flops_per_s(work: Work, machine: Machine) -> float:
    """Return the speed of matrix multiplications in the precision of a run, in FLOP/s.

    Matrices of fp32 are multiplied in TF32 if the device has it, because train.py allows TF32. A
    type that the device has no instructions for, and fp64, count with the speed of fp32.

    Args:
        work: Facts about the rank's optimizer step, with the precision of the run.
        machine: Machine on which the rank runs.
    """
    dtype = find_precision(work.precision).matmul
    speeds = machine.flops_per_s
    return speeds.get("tf32" if dtype == "float32" else dtype, speeds["float32"])


def forward_repeats(work: Work) -> float:
    """Return the factor by which activation checkpointing increases the elementwise work.

    The forward pass is half of the elementwise work, and it runs twice. The factor is therefore 1.5
    with activation checkpointing and 1 without.

    Args:
        work: Facts about the rank's optimizer step.
    """
    return 1.5 if work.checkpointing != "none" else 1.0


def moved_bytes(work: Work, machine: Machine, weights: float) -> float:
    """Return the bytes that a rank's elementwise operations read and write in a step.

    On a CPU a run in 16 bits counts as if it also read and wrote all activations in fp32.

    Args:
        work: Facts about the rank's optimizer step.
        machine: Machine on which the rank runs.
        weights: Bytes of the weights that the rank stores.
    """
    overhead = ON_CPU if machine.is_cpu else ON_GPU
    passes = overhead.plain if work.compile == "none" else overhead.compiled
    # A CPU needs as much time for 16-bit values as for fp32, and converts between both.
    precisions = {work.precision, "32-true"} if machine.is_cpu else {work.precision}
    kept = 0.0  # bytes per token and block
    for precision in precisions:
        plain_work = replace(work, checkpointing="none", precision=precision)
        kept += block_activations(plain_work)[0]
    per_token = forward_repeats(work) * passes * work.shape.n_layers * kept
    per_token += overhead.per_logit * 4 * work.shape.vocab_size / work.dims.tensor  # fp32 logits
    tokens = work.rank_tokens * work.accumulate / work.dims.pipeline
    return tokens * per_token + overhead.per_parameter * weights


def operation_calls(work: Work, machine: Machine) -> float:
    """Return the number of torch operations that a rank calls in a step.

    Args:
        work: Facts about the rank's optimizer step.
        machine: Machine on which the rank runs.
    """
    overhead = ON_CPU if machine.is_cpu else ON_GPU
    block_calls = forward_repeats(work) * overhead.block_calls
    calls = block_calls * work.shape.n_layers / work.dims.pipeline + overhead.step_calls
    return work.accumulate * work.microbatches * calls


def communicate(work: Work, machine: Machine, busy_s: float) -> tuple[dict[str, int], float, float]:
    """Return the traffic of the rank that sends most, and the time that it takes.

    Traffic overlaps with a fraction of the computation on a GPU. It does not on a CPU, whose cores
    compute and send.

    Args:
        work: Facts about the rank's optimizer step.
        machine: Machine on which the rank runs.
        busy_s: Seconds of computation in a step.

    Returns:
        Bytes by "kind, axis, link", seconds of all traffic, seconds that do not overlap.
    """
    all_traffic = map(find_traffic, work.ends)
    entries = max(all_traffic, key=lambda sent: sum(entry.n_bytes for entry in sent))
    wire: dict[str, int] = {}
    sent_s: dict[Traffic, float] = {}
    for entry in entries:
        link = find_link(entry, work.dims, machine)
        delay_s = link.wait_s + entry.hops * link.latency_s
        sent_s[entry] = entry.calls * delay_s + entry.n_bytes / link.bytes_per_s
        wire[f"{entry.what}, {entry.axis} axis, {link.name}"] = round(entry.n_bytes)
    exposed_s = 0.0
    for overlap in {entry.overlap for entry in entries}:
        # Entries with the same fraction share the time of the same computation.
        group = [entry for entry in entries if entry.overlap == overlap]
        hidden_s = 0.0 if machine.is_cpu else overlap * busy_s
        least_s = sum(sent_s[entry] * entry.exposed for entry in group)
        exposed_s += max(least_s, sum(sent_s[entry] for entry in group) - hidden_s)
    return wire, sum(sent_s.values()), exposed_s


def find_link(traffic: Traffic, dims: ParallelDims, machine: Machine) -> Link:
    """Return the link that limits a kind of traffic, with the bandwidth and latency of its ring.

    The ring joins the ranks of the traffic's axis. A ring within one node takes the machine's
    `link`, or its `host` if the ring spans more devices than `link` joins. A ring over several
    nodes leaves a node through the network cards of those of its ranks that are on this node, at
    most as fast as the link within the node. A tensor or a context group has neighbouring ranks. A
    ring of the data axis, which includes the context axis, has one rank of every tensor group. A
    pipeline has one of every data x tensor ranks.

    Where latency matters NCCL uses a tree over the nodes. The latency of the result is therefore
    that of log2(number of nodes) messages between nodes and of one message per rank within a node,
    divided by the number of ranks of the ring: the caller multiplies it by the messages of a ring.

    Args:
        traffic: Data of one kind that a rank sends, with the axis of the ring.
        dims: Number of ranks along each axis.
        machine: Machine on which the ranks run.
    """
    n_ranks = getattr(dims, traffic.axis)
    if traffic.axis in (CONTEXT, TENSOR):
        stride = 1  # distance of two neighbours of the ring, in ranks
    elif traffic.axis == PIPELINE:
        stride = dims.data * dims.tensor
    else:
        stride = dims.tensor
        n_ranks = dims.gradient_ranks
    n_on_node = max(1, machine.n_local // stride)
    link = machine.link
    if machine.host is not None and machine.island < stride * min(n_on_node, n_ranks):
        link = machine.host
    if n_on_node >= n_ranks:
        return link
    network = machine.network
    bandwidth = min(link.bytes_per_s, n_on_node * network.bytes_per_s)
    network_s = network.latency_s * math.log2(n_ranks / n_on_node)
    latency_s = (network_s + link.latency_s * n_on_node) / n_ranks
    return Link(network.name, bandwidth, latency_s, wait_s=link.wait_s)


def unit_of(n_bytes: float) -> tuple[str, int]:
    """Return the unit in which to print a number of bytes, "GiB" or "MiB", and its size."""
    return ("GiB", 2**30) if n_bytes >= 2**30 else ("MiB", 2**20)

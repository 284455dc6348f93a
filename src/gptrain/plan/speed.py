"""How long a step takes: a roofline of products, memory and calls, and what sending adds."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptrain.plan.communication import Traffic, find_traffic
from gptrain.plan.dims import PIPELINE, TENSOR
from gptrain.plan.flops import train_flops_per_token
from gptrain.plan.hardware import Device, Link
from gptrain.plan.memory import block_activations, estimate_memory
from gptrain.plan.work import Work

# What training reaches of a data sheet's figures, fitted to the rows of gptrain.plan.scale.
PRODUCTS, BANDWIDTH, GPU_CALL_S = 0.6, 0.8, 5e-6
# What a step does besides its products, counted in both nets: writings and readings of an
# activation, plain and compiled, of a logit, of a parameter; calls of torch for a block and a step.
PASSES, FUSED_PASSES, LOSS_PASSES, UPDATE_PASSES, BLOCK_CALLS, STEP_CALLS = 8, 4, 10, 10, 60, 150
# One slow core of 2020.
GUESS = {
    "threads": 1, "flops_per_s": {"float32": 5e10, "bfloat16": 5e10}, "memory_bytes_per_s": 1e10,
    "op_s": 5e-6, "links": {"gloo": {"2": {"latency_s": 1e-4, "bytes_per_s": 1e9}}},
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What ranks compute and send on.

    Attributes:
        memory_bytes: of a device; of the node where is_cpu, for all its ranks.
        flops_per_s: of products in training, by torch's name of their type.
        link: within a node.   network: between nodes, of each device.
        op_s: of a call of torch; a GPU computes meanwhile.
        island: devices that `link` joins, where it is not the node's; host: of rings beyond it.
    """

    name: str
    n_local: int
    memory_bytes: float
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    link: Link
    network: Link
    op_s: float
    source: str
    is_cpu: bool = False
    island: int | None = None
    host: Link | None = None


def machine_of(device: Device, n_local: int, link: Link, network: Link) -> Machine:
    """A node of GPUs of the table, at what they reach of their data sheets."""
    reached = {kind: PRODUCTS * peak for kind, peak in device.flops_per_s.items()}
    slower = [replace(one, bytes_per_s=BANDWIDTH * one.bytes_per_s) for one in (link, network)]
    bandwidth, source = BANDWIDTH * device.memory_bytes_per_s, f"{device.source}; {link.name}"
    facts = (device.name, n_local, device.memory_bytes, reached, bandwidth, *slower, GPU_CALL_S)
    return Machine(*facts, source)


def this_machine(measured: Path, n_local: int) -> Machine:
    """This machine's CPU, as `python -m gptrain.collectives --bench` measured it, or guessed."""
    facts, source = GUESS, "guessed; measure it: python -m gptrain.collectives --bench"
    with suppress(OSError, ValueError):
        facts, source = json.loads(measured.read_text()), str(measured)
    has_affinity = hasattr(os, "sched_getaffinity")
    n_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    links = facts["links"].get("gloo") or GUESS["links"]["gloo"]
    link = Link("gloo", **links.get(str(n_local), next(iter(links.values()))))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = max(1, n_cores // n_local) / facts["threads"]
    flops = {kind: share * peak for kind, peak in facts["flops_per_s"].items()}
    speeds = (flops, facts["memory_bytes_per_s"] / n_local, link, link, facts["op_s"])
    return Machine(f"{n_cores} cores", n_local, memory, *speeds, source, is_cpu=True)


def estimate(work: Work, machine: Machine) -> dict[str, Any]:
    """Bytes, FLOPs, seconds and speed of a step of the rank that has most to do.

    flops are the model's, of one device on average; recomputed_flops come on top of them.
    """
    shape, dims, n_stages = work.shape, work.dims, work.dims.pipeline
    ends = [replace(work, rank=rank) for rank in {0, n_stages - 1}]
    memory = max(map(estimate_memory, ends), key=lambda one: one["total"])
    traffic = max(map(find_traffic, ends), key=lambda found: sum(one.n_bytes for one in found))
    sizes = (shape.matrix_weights, shape.n_layers, shape.d_model, work.seq_len)
    flops = work.step_tokens * train_flops_per_token(*sizes) / dims.world_size
    head = 6 * work.step_tokens * shape.table / dims.world_size
    # Of a block's forward pass all but its last product.
    last = 6 * work.step_tokens * shape.n_layers * shape.d_model * shape.d_ff / dims.world_size
    again = (flops - head - last) / 3 if work.checkpointing == "full" else 0.0

    peaks = machine.flops_per_s
    peak = peaks.get(work.product_type) or peaks["float32"]
    if work.product_bytes == 4 and not machine.is_cpu:
        peak = peaks.get("tf32", peak)  # what train.py allows
    tokens = work.tokens * work.accumulate / n_stages
    passes = PASSES if work.compile == "none" else FUSED_PASSES
    whole, _ = block_activations(replace(work, checkpointing="none"))
    moved = tokens * shape.n_layers * passes * whole
    moved += tokens * LOSS_PASSES * 4 * shape.vocab_size / dims.tensor
    moved += UPDATE_PASSES * memory["weights"]
    calls = BLOCK_CALLS * shape.n_layers / n_stages + STEP_CALLS
    calls_s = machine.op_s * work.accumulate * work.microbatches * calls
    # The last stage has the head besides its blocks.
    busy_s = (flops + again + head * (n_stages - 1)) / peak + moved / machine.memory_bytes_per_s
    busy_s = busy_s + calls_s if machine.is_cpu else max(busy_s, calls_s)
    idle_s = busy_s * (n_stages - 1) / (work.microbatches * work.stages_per_rank)

    sent_s = shown_s = 0.0
    for beside in ("", "backward", "all"):
        room_s = {"": 0.0, "backward": 2 / 3 / work.accumulate, "all": 1.0}[beside] * busy_s
        parts = [(seconds(t, dims, machine), t.exposed) for t in traffic if t.beside == beside]
        all_s = sum(s for s, _ in parts)
        hidden_s = 0.0 if machine.is_cpu else room_s  # whose cores do both
        shown_s += max(sum(s * exposed for s, exposed in parts), all_s - hidden_s)
        sent_s += all_s
    step_s = busy_s + idle_s + shown_s
    needed = memory["total"] * (machine.n_local if machine.is_cpu else 1)
    return {
        "bytes_per_device": {name: round(n_bytes) for name, n_bytes in memory.items()},
        "fits": needed <= machine.memory_bytes,
        "step_s": step_s,
        "flops": round(flops),
        "recomputed_flops": round(again),
        "wire_bytes_per_step": round(sum(one.n_bytes for one in traffic)),
        "wire": {f"{one.what}, {one.axis} axis": round(one.n_bytes) for one in traffic},
        "communication_s": sent_s,
        "overlapped_s": sent_s - shown_s,
        "tokens_per_s": work.step_tokens / step_s,
        "mfu": flops / step_s / (peak if machine.is_cpu else peak / PRODUCTS),
        "scaling_efficiency": busy_s / step_s,
    }


def seconds(traffic: Traffic, dims: Any, machine: Machine) -> float:
    """Time of a step's traffic, alone.

    A ring over nodes leaves each by the network cards of all its ranks there: of a tensor group
    all that are in the node, of a data group those that are left. Messages follow each other as in
    a tree over the nodes, which NCCL takes where latency counts.
    """
    apart = {TENSOR: 1, PIPELINE: dims.data * dims.tensor}.get(traffic.axis, dims.tensor)
    size, link = getattr(dims, traffic.axis), machine.link
    n_here = max(1, machine.n_local // apart)
    if machine.island and apart * min(n_here, size) > machine.island:
        link = machine.host
    if n_here < size:
        bandwidth = min(link.bytes_per_s, n_here * machine.network.bytes_per_s)
        hops = machine.network.latency_s * math.log2(size / n_here) + link.latency_s * n_here
        link = replace(link, bytes_per_s=bandwidth, latency_s=hops / size)
    return traffic.rounds * link.latency_s + traffic.n_bytes / link.bytes_per_s

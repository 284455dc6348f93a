"""How long a step takes: a roofline of products, memory and calls, and what sending adds."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gptrain.core.strategies import PIPELINE, TENSOR, ParallelDims
from gptrain.costs.communication import Traffic, find_traffic
from gptrain.costs.flops import train_flops_per_token
from gptrain.costs.hardware import LINKS, Device, Link, Reached
from gptrain.costs.memory import block_activations, estimate_memory
from gptrain.costs.work import Work

# What training reaches of a data sheet's bandwidths; of its FLOP/s: costs.hardware.
BANDWIDTH, GPU_CALL_S = 0.8, 5e-6
CONTEXT_BYTES = 2**30  # of a GPU's memory: CUDA's context, workspaces of cuBLAS and NCCL
THREADS = 0.87  # 2 to this power: how much faster two threads are than one
MACHINE_NAME = "machine.json"


class Besides(NamedTuple):
    """What a step does besides its products.

    Attributes:
        plain, compiled: writings and readings of each activation that a block keeps.
        per_logit, per_parameter: of each logit, of each parameter.
        block_calls, step_calls: of torch, for a block and for the rest of a micro-step.
    """

    plain: int
    compiled: int
    per_logit: int
    per_parameter: int
    block_calls: int
    step_calls: int


# A GPU's counted in both nets; a CPU's, which is not only moving bytes, fitted to real runs:
# tests/plan_accuracy.py.
ON_GPU = Besides(7, 3, per_logit=10, per_parameter=10, block_calls=60, step_calls=150)
ON_CPU = Besides(33, 18, per_logit=16, per_parameter=40, block_calls=450, step_calls=100)
# Half of a core of 2024: it orders the strategies of a CPU that was never measured, whose speeds
# are not shown.
UNMEASURED: dict[str, Any] = {
    "threads": 1, "flops_per_s": {"float32": 5e10, "bfloat16": 5e10}, "memory_bytes_per_s": 1.6e10,
    "op_s": 4.3e-6,
    "links": {"gloo": {"2": {"latency_s": 2e-4, "bytes_per_s": 1.5e9, "wait_s": 2.5e-3}}},
}  # fmt: skip
FULL_SPEED = Reached(1.0, 1.0)  # of speeds that were measured in training
TIMES = ("step_s", "communication_s", "overlapped_s", "tokens_per_s", "mfu", "scaling_efficiency",
         "hours", "device_hours")  # fmt: skip


class DamagedMeasurementError(ValueError):
    """A machine.json that is there and cannot be used; the message names it."""


@dataclass(frozen=True)
class Machine:
    """What ranks compute and send on.

    Attributes:
        memory_bytes: of a device, for tensors; of the node where is_cpu, for all its ranks.
        flops_per_s: of products in training, by torch's name of their type.
        reached: of what the data sheet says, with attention's share of the products' speed.
        op_s: of a call of torch; a GPU computes meanwhile.
        link: within a node.   network: between nodes, of each device.
        has_bf16: it has instructions for it.
        is_measured: False of a CPU of which no speed is known.
        island: devices that `link` joins, 0: the node's.   host: the link of rings beyond it.
    """

    name: str
    n_local: int
    memory_bytes: float
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    op_s: float
    link: Link
    network: Link
    source: str
    reached: Reached = FULL_SPEED
    is_cpu: bool = False
    has_bf16: bool = True
    is_measured: bool = True
    island: int = 0
    host: Link | None = None


def machine_of(
    device: Device, n_local: int, link: Link | None = None, network: Link | None = None
) -> Machine:
    """A node of GPUs of the table, at what they reach of their data sheets."""
    link, network = link or LINKS[device.link], network or LINKS["infiniband_ndr"]
    return Machine(
        device.name,
        n_local,
        device.memory_bytes - CONTEXT_BYTES,
        {kind: device.reached.products * peak for kind, peak in device.flops_per_s.items()},
        BANDWIDTH * device.memory_bytes_per_s,
        GPU_CALL_S,
        replace(link, bytes_per_s=BANDWIDTH * link.bytes_per_s),
        replace(network, bytes_per_s=BANDWIDTH * network.bytes_per_s),
        f"{device.source}; {link.name}, {network.name}",
        device.reached,
        has_bf16="bfloat16" in device.flops_per_s,
    )


def this_machine(output_dir: Path, n_local: int) -> Machine:
    """This machine's CPU, as `python -m gptrain.plan --measure` found it.

    Raises: DamagedMeasurementError.
    """
    measured, n_cores = read_measurement(output_dir / MACHINE_NAME), count_cores()
    facts, source = measured or UNMEASURED, str(output_dir / MACHINE_NAME)
    if measured is None:
        source = "speed not measured; try: python -m gptrain.plan --measure"
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = int(asked) if asked.isdigit() else max(1, n_cores // n_local)
    faster = (threads / facts["threads"]) ** THREADS
    share = (threads / n_cores) ** THREADS if measured else faster  # bytes/s: of all cores
    flops = {kind: faster * peak for kind, peak in facts["flops_per_s"].items()}
    links = facts["links"].get("gloo") or UNMEASURED["links"]["gloo"]
    link = Link("gloo", **links.get(str(n_local), next(iter(links.values()))))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    speeds = (flops, share * facts["memory_bytes_per_s"], facts["op_s"], link, link)
    machine = Machine(f"{n_cores} cores", n_local, memory, *speeds, source, is_cpu=True)
    return replace(machine, has_bf16=cpu_has_bf16(), is_measured=measured is not None)


def read_measurement(path: Path) -> dict[str, Any] | None:
    """What `--measure` wrote; None where nothing is.   Raises: DamagedMeasurementError."""
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text())
        links = [Link("", **link) for one in facts["links"].values() for link in one.values()]
        speeds = [facts[key] for key in ("threads", "op_s", "memory_bytes_per_s")]
        speeds += [facts["flops_per_s"]["float32"], *(link.bytes_per_s for link in links)]
        if not all(0 < one < math.inf for one in speeds):
            raise ValueError("a speed that is none")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"{path}: damaged ({type(error).__name__}: {error})"
        raise DamagedMeasurementError(f"{message}; try: python -m gptrain.plan --measure") from None
    return facts


def cpu_has_bf16() -> bool:
    """Whether this CPU has AVX512-BF16, as torch asks; False where the system does not say."""
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "avx512_bf16" in cpus.read_text()


def count_cores() -> int:
    """Cores that this process may use; macOS and Windows do not say which are ours."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def estimate(work: Work, machine: Machine) -> dict[str, Any]:
    """Bytes, FLOPs, seconds and speed of a step of the rank that has most to do.

    flops are the model's, of one device on average, without recomputation and the extra work of the
    optimizer.
    """
    shape, n_stages, n_ranks = work.shape, work.dims.pipeline, work.dims.world_size
    memory = max(map(estimate_memory, work.ends), key=lambda one: one["total"])
    traffic = max(map(find_traffic, work.ends), key=lambda found: sum(one.n_bytes for one in found))
    sizes = (shape.matrix_weights, shape.n_layers, shape.d_model, work.seq_len)
    flops = work.step_tokens * train_flops_per_token(*sizes) / n_ranks
    attention = work.step_tokens * train_flops_per_token(0, *sizes[1:]) / n_ranks
    each = 6 * work.step_tokens / n_ranks  # of a weight
    head, down = each * shape.table, each * shape.n_layers * shape.d_model * shape.d_ff
    # Of a block's forward pass all but its last product; "selective" repeats no product.
    is_full = work.checkpointing == "full"
    again = (flops - head - down) / 3 if is_full else 0.0
    slower = (4 / 3 if is_full else 1) * attention * (1 / machine.reached.attention - 1)
    repeated = 1.5 if work.checkpointing != "none" else 1.0  # of all else the forward pass: half
    update = work.optimizer.flops(work)

    half = "bfloat16" if "bf16" in work.precision else "float16"
    kinds = (half,) if work.product_bytes == 2 else ("tf32",)  # which train.py allows
    speeds = machine.flops_per_s
    peak = next(speeds[kind] for kind in (*kinds, "float32") if kind in speeds)
    tokens = work.tokens * work.accumulate / n_stages
    besides = ON_CPU if machine.is_cpu else ON_GPU
    passes = repeated * (besides.plain if work.compile == "none" else besides.compiled)
    # A CPU takes as long for 16 bits as for 32, and converts one to the other.
    precisions = {work.precision, "32-true"} if machine.is_cpu else {work.precision}
    works = [replace(work, checkpointing="none", precision=one) for one in precisions]
    kept = sum(block_activations(one)[0] for one in works)
    moved = passes * shape.n_layers * kept
    moved += besides.per_logit * 4 * shape.vocab_size / work.dims.tensor
    moved = tokens * moved + besides.per_parameter * memory["weights"]
    moved_s = moved / machine.memory_bytes_per_s
    calls = repeated * besides.block_calls * shape.n_layers / n_stages + besides.step_calls
    calls_s = machine.op_s * work.accumulate * work.microbatches * calls
    # The last stage has the head besides its blocks.
    busy_s = (flops + again + slower + head * (n_stages - 1)) / peak + moved_s
    busy_s = busy_s + calls_s if machine.is_cpu else max(busy_s, calls_s)
    idle_s = busy_s * (n_stages - 1) / (work.microbatches * work.costs.stages_per_rank)
    update_s = update / max(speeds["float32"], speeds.get("bfloat16", 0))

    sent_s, shown_s, wire = {}, 0.0, {}
    for one in traffic:
        link = find_way(one, work.dims, machine)
        late_s = link.wait_s + one.hops * link.latency_s
        sent_s[one] = one.calls * late_s + one.n_bytes / link.bytes_per_s
        wire[f"{one.what}, {one.axis} axis, {link.name}"] = round(one.n_bytes)
    for room in {one.room for one in traffic}:
        beside = [one for one in traffic if one.room == room]
        hidden_s = 0.0 if machine.is_cpu else room * busy_s  # a CPU's cores do both
        least_s = sum(sent_s[one] * one.exposed for one in beside)
        shown_s += max(least_s, sum(sent_s[one] for one in beside) - hidden_s)
    step_s, all_s = busy_s + idle_s + update_s + shown_s, sum(sent_s.values())
    return {
        "bytes_per_device": {name: round(n_bytes) for name, n_bytes in memory.items()},
        "fits": memory["total"] * machine.n_local**machine.is_cpu <= machine.memory_bytes,
        "step_s": step_s,
        "flops": round(flops),
        "recomputed_flops": round(again),
        "optimizer_flops": round(update),
        "wire_bytes_per_step": sum(wire.values()),
        "wire": wire,
        "communication_s": all_s,
        "overlapped_s": all_s - shown_s,
        "tokens_per_s": work.step_tokens / step_s,
        "mfu": flops / step_s / peak * machine.reached.products,
        "scaling_efficiency": 1 - (idle_s + shown_s) / step_s,
    }


def find_way(traffic: Traffic, dims: ParallelDims, machine: Machine) -> Link:
    """The link that a step's traffic takes: the slowest of its ring, named after it.

    A ring over nodes leaves each by the network cards of all its ranks there: of a tensor group
    all that are in the node, of a data group those that are left. Messages follow each other as in
    a tree over the nodes, which NCCL takes where latency counts.
    """
    apart = {TENSOR: 1, PIPELINE: dims.data * dims.tensor}.get(traffic.axis, dims.tensor)
    size, link, network = getattr(dims, traffic.axis), machine.link, machine.network
    n_here = max(1, machine.n_local // apart)
    if machine.host is not None and machine.island < apart * min(n_here, size):
        link = machine.host
    if n_here >= size:
        return link
    bandwidth = min(link.bytes_per_s, n_here * network.bytes_per_s)
    hops_s = network.latency_s * math.log2(size / n_here) + link.latency_s * n_here
    return Link(network.name, bandwidth, hops_s / size, wait_s=link.wait_s)


def unit_of(n_bytes: float) -> tuple[str, int]:
    """The unit to show so many bytes in, and its size."""
    return ("GiB", 2**30) if n_bytes >= 2**30 else ("MiB", 2**20)

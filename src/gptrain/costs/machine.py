"""Memory and speeds of the machine that a run uses: GPUs of the table, or the measured CPU."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptrain.costs.hardware import LINKS, Device, Efficiency, Link

# Fraction of the bandwidth on a data sheet that training reaches, of memory and of links.
BANDWIDTH = 0.8
# Seconds that a CPU needs to launch one operation of torch on a GPU.
GPU_CALL_S = 5e-6
# Memory of a GPU that tensors cannot use: the CUDA context, workspaces of cuBLAS and NCCL.
CONTEXT_BYTES = 2**30
# n threads compute n ** THREADS times as fast as one thread.
THREADS = 0.87
MACHINE_NAME = "machine.json"
# Speeds of half a core of 2024. They rank the strategies on a CPU that was never measured. The
# planner does not print times that follow from them.
UNMEASURED: dict[str, Any] = {
    "threads": 1, "flops_per_s": {"float32": 5e10, "bfloat16": 5e10}, "memory_bytes_per_s": 1.6e10,
    "op_s": 4.3e-6,
    "links": {"gloo": {"2": {"latency_s": 2e-4, "bytes_per_s": 1.5e9, "wait_s": 2.5e-3}}},
}  # fmt: skip
FULL_SPEED = Efficiency(1.0, 1.0)  # for speeds that were measured, not read from a data sheet


class DamagedMeasurementError(ValueError):
    """Raised if machine.json, the file of measured speeds, is damaged. The message has its path."""


@dataclass(frozen=True)
class Machine:
    """Speeds and memory of the nodes that a run uses.

    Attributes:
        name: Name of the device, or the number of cores of a CPU.
        n_local: Number of ranks on one node.
        memory_bytes: Memory for tensors: of one GPU, or of the node if `is_cpu`.
        flops_per_s: Speed of matrix multiplications in training, of one rank. The keys are torch's
            names of the types, and "tf32".
        memory_bytes_per_s: Bandwidth of the memory in training, of one rank.
        op_s: Seconds to call one operation of torch. A GPU computes meanwhile, a CPU does not.
        link: Link between the ranks of one node.
        network: Link between nodes, of each device.
        source: Origin of the speeds, for the output of the planner.
        efficiency: Fractions of the speeds on the data sheet that `flops_per_s` includes.
        is_cpu: True if ranks compute on the CPU and share its memory.
        has_bf16: True if the device has bf16 instructions.
        is_measured: False if the machine is a CPU whose speeds are not known.
        island: Number of devices that `link` joins. 0 if `link` joins all devices of a node.
        host: Link of rings with more devices than `island`.
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
    efficiency: Efficiency = FULL_SPEED
    is_cpu: bool = False
    has_bf16: bool = True
    is_measured: bool = True
    island: int = 0
    host: Link | None = None

    def has_memory_for(self, rank_bytes: float) -> bool:
        """Return whether the memory is large enough for all ranks that share it.

        The ranks of a node share the memory of a CPU. Each GPU has a memory of its own.

        Args:
            rank_bytes: Bytes that one rank needs.
        """
        return rank_bytes * (self.n_local if self.is_cpu else 1) <= self.memory_bytes


def machine_of(
    device: Device, n_local: int, link: Link | None = None, network: Link | None = None
) -> Machine:
    """Return a node of `n_local` GPUs, with the speeds that training reaches in practice.

    These are fractions of the figures on the data sheets. The memory is reduced by what the CUDA
    context and the libraries take.

    Args:
        device: Row of the table of GPUs.
        n_local: Number of GPUs, and of ranks, on the node.
        link: Link between the GPUs of a node. None for the device's own.
        network: Link between nodes, of each GPU. None for InfiniBand NDR.
    """
    link = link or LINKS[device.link]
    network = network or LINKS["infiniband_ndr"]
    matmul = device.efficiency.matmul
    return Machine(
        device.name,
        n_local,
        memory_bytes=device.memory_bytes - CONTEXT_BYTES,
        flops_per_s={dtype: matmul * peak for dtype, peak in device.flops_per_s.items()},
        memory_bytes_per_s=BANDWIDTH * device.memory_bytes_per_s,
        op_s=GPU_CALL_S,
        link=replace(link, bytes_per_s=BANDWIDTH * link.bytes_per_s),
        network=replace(network, bytes_per_s=BANDWIDTH * network.bytes_per_s),
        source=f"{device.source}; {link.name}, {network.name}",
        efficiency=device.efficiency,
        has_bf16="bfloat16" in device.flops_per_s,
    )


def this_machine(output_dir: Path, n_local: int) -> Machine:
    """Return the CPU of this machine as the planner's machine, with its measured speeds.

    `python -m gptrain.plan --measure` writes the speeds to machine.json. The speeds of a rank
    depend on its number of threads. This number is OMP_NUM_THREADS, or an equal share of the cores
    if OMP_NUM_THREADS is not a number. FLOP/s are scaled to it from the threads of the measured
    rank, and the bandwidth of the memory from all cores. The link is the one that was measured with
    `n_local` ranks, or else the first that was measured.

    Without a measurement, FLOP/s and bandwidth are scaled to the number of threads from typical
    values of one thread, and `is_measured` is False.

    Args:
        output_dir: Folder that contains machine.json.
        n_local: Number of ranks on the machine.

    Raises:
        DamagedMeasurementError: If machine.json exists, but cannot be used.
    """
    path = output_dir / MACHINE_NAME
    measured = read_measurement(path)
    facts = UNMEASURED if measured is None else measured
    if measured is None:
        source = "speed not measured; try: python -m gptrain.plan --measure"
    else:
        source = str(path)
    n_cores = count_cores()
    omp_threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = int(omp_threads) if omp_threads.isdigit() else max(1, n_cores // n_local)
    speedup = (threads / facts["threads"]) ** THREADS
    # The measured bandwidth is that of all cores together. UNMEASURED has that of one thread.
    bandwidth_share = speedup if measured is None else (threads / n_cores) ** THREADS
    links = facts["links"].get("gloo") or UNMEASURED["links"]["gloo"]
    link = Link("gloo", **links.get(str(n_local), next(iter(links.values()))))
    return Machine(
        f"{n_cores} cores",
        n_local,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        flops_per_s={dtype: speedup * speed for dtype, speed in facts["flops_per_s"].items()},
        memory_bytes_per_s=bandwidth_share * facts["memory_bytes_per_s"],
        op_s=facts["op_s"],
        link=link,
        network=link,
        source=source,
        is_cpu=True,
        has_bf16=cpu_has_bf16(),
        is_measured=measured is not None,
    )


def read_measurement(path: Path) -> dict[str, Any] | None:
    """Return the content of a machine.json, or None if the file does not exist.

    Args:
        path: Path of the file.

    Raises:
        DamagedMeasurementError: If the file cannot be read, or a speed in it is missing or is not a
            positive number.
    """
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text())
        speeds = [facts[key] for key in ("threads", "op_s", "memory_bytes_per_s")]
        speeds.append(facts["flops_per_s"]["float32"])
        for links in facts["links"].values():
            speeds += [Link("", **link).bytes_per_s for link in links.values()]
        if not all(0 < speed < math.inf for speed in speeds):
            raise ValueError("a speed is not a positive number")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"{path}: damaged ({type(error).__name__}: {error})"
        raise DamagedMeasurementError(f"{message}; try: python -m gptrain.plan --measure") from None
    return facts


def cpu_has_bf16() -> bool:
    """Return whether this CPU has AVX512-BF16 instructions; False if there is no /proc/cpuinfo."""
    cpu_info = Path("/proc/cpuinfo")
    return cpu_info.exists() and "avx512_bf16" in cpu_info.read_text()


def count_cores() -> int:
    """Return the number of logical CPUs on which this process may run.

    macOS and Windows report only the number of the machine. A container's quota of CPU time does
    not count.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""Measurement of collectives, by the definitions of nccl-tests, and of the speed of this CPU."""

import json
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from gptrain.checkpoints import fileops
from gptrain.collectives.command import CollectivesRun
from gptrain.collectives.operations import COLLECTIVES, print_on_rank_0, process_group, time_calls
from gptrain.costs.machine import MACHINE_NAME, DamagedMeasurementError, read_measurement
from gptrain.parallel.mesh import gather
from gptrain.runtime.measure import measure_matmul
from gptrain.runtime.watchdog import Guard

SMALLEST_BYTES, FACTOR = 2**12, 16  # first size of the buffers, and factor to the next size
ACTIVATIONS = 2**18  # elements of the measured activation, as in a small net


def measure(cfg: CollectivesRun, guard: Guard) -> dict[str, float]:
    """Measure all collectives and this CPU, and write the speeds for later plans.

    Every rank of the job calls this function. Rank 0 prints the collectives, and writes the speeds
    to machine.json in `output_dir`.

    Args:
        cfg: Configuration of the command.
        guard: Watchdog of the rank, which gets a heartbeat before each collective.

    Returns:
        An empty dict: no metrics.

    Raises:
        MissingRanksError: If not all ranks start in time, or if their address cannot be used.
        OSError: On rank 0, if machine.json cannot be written.
    """
    times = {}
    with process_group(cfg) as device:
        for name in COLLECTIVES:
            guard.heartbeat.beat(phase=name)
            times[name] = sweep(name, device, cfg.max_bytes)
        write_speeds(times["all_reduce"], device, Path(cfg.output_dir) / MACHINE_NAME)
    return {}


def sweep(name: str, device: torch.device, max_bytes: int) -> list[tuple[int, float]]:
    """Measure a collective for buffers of growing size, and print a line per size on rank 0.

    All ranks must call it.

    Args:
        name: Name of the collective, a key of COLLECTIVES such as `all_reduce`.
        device: Device of the buffers.
        max_bytes: Largest size of a rank's buffer, in bytes.

    Returns:
        Size of a rank's buffer in bytes, and seconds of one call, for each size.
    """
    n_ranks = dist.get_world_size()
    times = []
    n_bytes = SMALLEST_BYTES
    collective = COLLECTIVES[name]
    a, b = collective.bus_factor
    print_on_rank_0(f"\n{name:14}      bytes       time us  algorithm GB/s  bus GB/s")
    while n_bytes <= max_bytes:
        source, target = torch.zeros(2, n_ranks, n_bytes // 4 // n_ranks, device=device)
        calls = max(1, min(20, 2**24 // n_bytes))
        seconds = time_calls(lambda s=source, t=target: collective.call(s, t), device, calls)
        rate = source.nbytes / seconds / 1e9  # GB/s
        bus = (a + b / n_ranks) * rate
        print_on_rank_0(f"{source.nbytes:25}{seconds * 1e6:14.1f}{rate:16.3f}{bus:10.3f}")
        times.append((source.nbytes, seconds))
        n_bytes *= FACTOR
    return times


def write_speeds(all_reduce: list[tuple[int, float]], device: torch.device, path: Path) -> None:
    """Measure the CPU and the link between the ranks, and write the speeds to machine.json.

    All ranks must call it, because the CPU is measured while all of them compute. Only rank 0
    writes, and prints the path. FLOP/s are those of the slowest rank. The bandwidth of the memory
    is that of all ranks together, measured by an activation function.

    Args:
        all_reduce: Bytes and seconds of all-reduces of growing size.
        device: Device of the all-reduces.
        path: Path of machine.json, whose folder is created. Links that an earlier measurement wrote
            are kept. A damaged file is replaced.

    Raises:
        OSError: On rank 0, if the file cannot be written.
    """
    cpu = torch.device("cpu")
    n_ranks = dist.get_world_size()
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        dist.barrier()
        slowest = min(gather(measure_matmul(cpu, dtype)))
        flops[str(dtype).removeprefix("torch.")] = slowest
    values = torch.randn(ACTIVATIONS)
    scalar = torch.zeros(1)
    pass_s = time_calls(lambda: torch.nn.functional.gelu(values), cpu, 50, min)
    facts = {
        "threads": torch.get_num_threads(),
        "flops_per_s": flops,
        "memory_bytes_per_s": n_ranks * 2 * values.nbytes / pass_s,
        "op_s": time_calls(lambda: scalar.add_(1), cpu, 1000, min),
    }
    new_links = {str(n_ranks): measure_link(all_reduce, device)} if n_ranks > 1 else {}
    if dist.get_rank() == 0:
        backend = dist.get_backend()
        links = {}
        with suppress(DamagedMeasurementError):  # a damaged machine.json is replaced
            links = (read_measurement(path) or {"links": {}})["links"]
        facts["links"] = links | {backend: links.get(backend, {}) | new_links}
        path.parent.mkdir(parents=True, exist_ok=True)
        fileops.replace(path, json.dumps(facts, indent=1).encode() + b"\n")
        print(f"\nkept in {path}, for python -m gptrain.plan")


def measure_link(times: list[tuple[int, float]], device: torch.device) -> dict[str, float]:
    """Measure the link between the ranks. All ranks must call it, and there must be at least two.

    A collective in a step waits until all ranks have reached it. On CPUs the wait is most of its
    time, because the ranks do not compute equally fast and the sending thread waits for a core.

    Args:
        times: Bytes and seconds of all-reduces of growing size.
        device: Device of the all-reduces.

    Returns:
        latency_s: Seconds of each message of a ring.
        bytes_per_s: Bandwidth of a rank.
        wait_s: Seconds that a collective takes longer between computations than alone.
    """
    n_ranks = dist.get_world_size()
    small, small_s = times[0]
    large, large_s = times[-1]
    messages = 2 * (n_ranks - 1)  # messages of a ring all-reduce
    buffer = torch.zeros(small // 4, device=device)  # fp32
    inputs = torch.randn(2048, 256, device=device, requires_grad=True)
    weight = torch.randn(256, 256, device=device)

    def compute() -> None:
        torch.nn.functional.gelu(inputs @ weight).sum().backward()

    alone_s = time_calls(lambda: dist.all_reduce(buffer), device, 2, min)
    computing_s = time_calls(compute, device, 40)
    both_s = time_calls(lambda: (compute(), dist.all_reduce(buffer)), device, 40)
    rate = messages / n_ranks * (large - small) / max(1e-9, large_s - small_s)
    wait_s = max(0.0, both_s - computing_s - alone_s)
    return {"latency_s": alone_s / messages, "bytes_per_s": rate, "wait_s": wait_s}

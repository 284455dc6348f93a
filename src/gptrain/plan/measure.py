"""Time and bandwidth of collectives by the definitions of nccl-tests, and this CPU's speed."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from gptrain.checkpoints import fileops
from gptrain.collectives.command import CollectivesRun
from gptrain.collectives.operations import (
    COLLECTIVES,
    gather_objects,
    print_on_rank_0,
    process_group,
    time_calls,
)
from gptrain.costs.machine import MACHINE_NAME, DamagedMeasurementError, read_measurement
from gptrain.runtime.measure import measure_matmul
from gptrain.runtime.watchdog import Guard

SMALLEST_BYTES, FACTOR = 2**12, 16  # of the sweep
ACTIVATIONS = 2**18  # numbers, of a small net


def measure(cfg: CollectivesRun, guard: Guard) -> dict[str, float]:
    """What each rank does; rank 0 prints, and keeps what it found in machine.json of output_dir."""
    times = {}
    with process_group(cfg) as device:
        for name in COLLECTIVES:
            guard.heartbeat.beat(phase=name)
            times[name] = sweep(name, device, cfg.max_bytes)
        keep(times["all_reduce"], device, Path(cfg.output_dir) / MACHINE_NAME)
    return {}


def sweep(name: str, device: torch.device, max_bytes: int) -> list[tuple[int, float]]:
    """Prints a line per size; returns bytes of a rank's buffer and seconds."""
    n_ranks, found, n_bytes = dist.get_world_size(), [], SMALLEST_BYTES
    collective = COLLECTIVES[name]
    a, b = collective.bus_factor
    print_on_rank_0(f"\n{name:14}      bytes       time us  algorithm GB/s  bus GB/s")
    while n_bytes <= max_bytes:
        mine, got = torch.zeros(2, n_ranks, n_bytes // 4 // n_ranks, device=device)
        calls = max(1, min(20, 2**24 // n_bytes))
        seconds = time_calls(lambda m=mine, g=got: collective.call(m, g), device, calls)
        rate = mine.nbytes / seconds / 1e9
        bus = (a + b / n_ranks) * rate
        print_on_rank_0(f"{mine.nbytes:25}{seconds * 1e6:14.1f}{rate:16.3f}{bus:10.3f}")
        found.append((mine.nbytes, seconds))
        n_bytes *= FACTOR
    return found


def keep(all_reduce: list[tuple[int, float]], device: torch.device, path: Path) -> None:
    """Measures this machine's CPU while all ranks compute; writes it with the link of all_reduce.

    FLOP/s are those of the slowest rank, bytes/s those of all together that an activation function
    reads and writes.
    """
    cpu, n_ranks, flops = torch.device("cpu"), dist.get_world_size(), {}
    for dtype in (torch.float32, torch.bfloat16):
        dist.barrier()
        slowest = min(gather_objects(measure_matmul(cpu, dtype)))
        flops[str(dtype).removeprefix("torch.")] = slowest
    values, one = torch.randn(ACTIVATIONS), torch.zeros(1)
    pass_s = time_calls(lambda: torch.nn.functional.gelu(values), cpu, 50, min)
    facts = {
        "threads": torch.get_num_threads(),
        "flops_per_s": flops,
        "memory_bytes_per_s": n_ranks * 2 * values.nbytes / pass_s,
        "op_s": time_calls(lambda: one.add_(1), cpu, 1000, min),
    }
    found = {str(n_ranks): measure_link(all_reduce, device)} if n_ranks > 1 else {}
    if dist.get_rank() == 0:
        backend, links = dist.get_backend(), {}
        with suppress(DamagedMeasurementError):  # it is replaced; of a sound file other links stay
            links = (read_measurement(path) or {"links": {}})["links"]
        facts["links"] = links | {backend: links.get(backend, {}) | found}
        path.parent.mkdir(parents=True, exist_ok=True)
        fileops.replace(path, json.dumps(facts, indent=1).encode() + b"\n")
        print(f"\nkept in {path}, for python -m gptrain.plan")


def measure_link(times: list[tuple[int, float]], device: torch.device) -> dict[str, float]:
    """Latency and bytes/s of a message of a ring, and how long a collective waits for the ranks.

    On CPUs that is most of its time in a step: they come to it one after the other, and what sends
    waits for a core.

    Args:
        times: bytes and seconds of all-reduces of growing size.
    """
    (small, small_s), (large, large_s), n_ranks = times[0], times[-1], dist.get_world_size()
    messages, mine = 2 * (n_ranks - 1), torch.zeros(small // 4, device=device)
    inputs = torch.randn(2048, 256, device=device, requires_grad=True)
    weight = torch.randn(256, 256, device=device)

    def compute() -> None:
        torch.nn.functional.gelu(inputs @ weight).sum().backward()

    alone_s = time_calls(lambda: dist.all_reduce(mine), device, 2, min)
    computing_s = time_calls(compute, device, 40)
    both_s = time_calls(lambda: (compute(), dist.all_reduce(mine)), device, 40)
    rate = messages / n_ranks * (large - small) / max(1e-9, large_s - small_s)
    wait_s = max(0.0, both_s - computing_s - alone_s)
    return {"latency_s": alone_s / messages, "bytes_per_s": rate, "wait_s": wait_s}

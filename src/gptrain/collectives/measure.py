"""Time and bandwidth of collectives by the definitions of nccl-tests, and this machine's speed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gptrain.collectives.operations import (
    COLLECTIVES,
    all_reduce_by_center,
    all_reduce_by_ring,
    from_all,
    say,
)
from gptrain.lit.perf import measure_matmul, wait_for
from gptrain.resilience import fileops
from gptrain.small_files import UnreadableFile, read_json

SMALLEST_BYTES, FACTOR = 2**12, 16  # of the sweep
BATCHES = 5  # of calls
ACTIVATIONS = 2**18  # numbers, of a small net


def seconds_of(
    call: Callable[[], Any],
    device: torch.device,
    calls: int,
    choose: Callable[[list[float]], float] = median,
) -> float:
    """Of one call on the slowest rank, of several batches of them; all ranks make it together."""
    found = []
    for _ in range(1 + BATCHES):
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        wait_for(device)
        found.append((time.perf_counter() - start_s) / calls)
    return max(from_all(choose(found[1:])))


def sweep(name: str, device: torch.device, max_bytes: int) -> list[tuple[int, float]]:
    """Prints a line per size; returns bytes of a rank's buffer and seconds."""
    n_ranks, found, n_bytes = dist.get_world_size(), [], SMALLEST_BYTES
    *_, (a, b), call = COLLECTIVES[name]
    say(f"\n{name:14}      bytes       time us  algorithm GB/s  bus GB/s")
    while n_bytes <= max_bytes:
        mine, got = torch.zeros(2, n_ranks, n_bytes // 4 // n_ranks, device=device)
        calls = max(1, min(20, 2**24 // n_bytes))
        seconds = seconds_of(lambda m=mine, g=got: call(m, g), device, calls)
        rate = mine.nbytes / seconds / 1e9
        bus = (a + b / n_ranks) * rate
        say(f"{mine.nbytes:25}{seconds * 1e6:14.1f}{rate:16.3f}{bus:10.3f}")
        found.append((mine.nbytes, seconds))
        n_bytes *= FACTOR
    return found


def compare_all_reduces(device: torch.device, n_bytes: int) -> None:
    """The two of sends and receives beside the library's, whose result they must have."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(n_bytes // 4 // n_ranks * n_ranks, device=device).view(n_ranks, -1)
    mine = (mine % 1000 + rank).float()  # sums of integers are exact in any order
    dist.all_reduce(expected := mine.clone())
    say(f"\nall-reduce of {mine.nbytes / 2**20:.1f} MiB   rank 0 sent   other ranks   time ms")
    ways = {"through rank 0": all_reduce_by_center, "around a ring": all_reduce_by_ring}
    for name, way in (ways | {dist.get_backend(): dist.all_reduce}).items():
        sent = from_all(way(result := mine.clone()))
        if not torch.equal(result, expected):
            raise RuntimeError(f"all-reduce {name} differs from the library's on rank {rank}")
        ends = "".join(f"{n / 2**20:10.1f} MiB" if n else f"{'-':>14}" for n in (sent[0], sent[-1]))
        result.zero_()
        say(f"{name:21}{ends}{seconds_of(lambda w=way: w(result), device, 1) * 1e3:10.2f}")
    say("n ranks: rank 0 sends n - 1 buffers; of a ring each sends 2(n - 1)/n, all at once")


def keep(all_reduce: list[tuple[int, float]], device: torch.device, path: Path) -> None:
    """Measures this machine's CPU while all ranks compute; writes it with the link of all_reduce.

    FLOP/s are those of the slowest rank, bytes/s those of all together that an activation function
    reads and writes.
    """
    cpu, n_ranks, flops = torch.device("cpu"), dist.get_world_size(), {}
    for dtype in (torch.float32, torch.bfloat16):
        dist.barrier()
        slowest = min(from_all(measure_matmul(cpu, dtype)))
        flops[str(dtype).removeprefix("torch.")] = slowest
    values, one = torch.randn(ACTIVATIONS), torch.zeros(1)
    pass_s = seconds_of(lambda: torch.nn.functional.gelu(values), cpu, 50, min)
    facts = {
        "threads": torch.get_num_threads(),
        "flops_per_s": flops,
        "memory_bytes_per_s": n_ranks * 2 * values.nbytes / pass_s,
        "op_s": seconds_of(lambda: one.add_(1), cpu, 1000, min),
    }
    found = {str(n_ranks): measure_link(all_reduce, device)} if n_ranks > 1 else {}
    if dist.get_rank() == 0:
        facts["links"] = add_links(path, dist.get_backend(), found)
        path.parent.mkdir(parents=True, exist_ok=True)
        fileops.replace(path, json.dumps(facts, indent=1).encode() + b"\n")
        print(f"\nkept in {path}, for python -m gptrain.plan")


def add_links(path: Path, backend: str, found: dict[str, Any]) -> dict[str, Any]:
    """The links of an older file, and those found now; with a warning where it is damaged."""
    try:
        old = read_json(path)["links"]
        return old | {backend: old.get(backend, {}) | found}
    except FileNotFoundError:
        pass
    except (UnreadableFile, LookupError, TypeError, AttributeError):
        print(f"warning: {path}: damaged; what else it held is lost", file=sys.stderr)
    return {backend: found}


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

    alone_s = seconds_of(lambda: dist.all_reduce(mine), device, 2, min)
    computing_s = seconds_of(compute, device, 40)
    both_s = seconds_of(lambda: (compute(), dist.all_reduce(mine)), device, 40)
    rate = messages / n_ranks * (large - small) / max(1e-9, large_s - small_s)
    wait_s = max(0.0, both_s - computing_s - alone_s)
    return {"latency_s": alone_s / messages, "bytes_per_s": rate, "wait_s": wait_s}

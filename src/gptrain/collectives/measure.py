"""Time and bandwidth of collectives by the definitions of nccl-tests, and this machine's speed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
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
from gptrain.launch.devices import cores_per_rank
from gptrain.lit.perf import measure_matmul, wait_for
from gptrain.resilience import fileops
from gptrain.small_files import read_json

SMALLEST_BYTES, FACTOR = 2**12, 16  # of the sweep
BATCHES = 5  # of calls; their median counts
PRODUCTS_BETWEEN = 4  # about what a small block computes
COPIED_BYTES = 2**26  # larger than the caches


def seconds_of(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Of one call on the slowest rank; all ranks make it together."""
    found = []
    for _ in range(1 + BATCHES):
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        wait_for(device)
        found.append((time.perf_counter() - start_s) / calls)
    return max(from_all(sorted(found[1:])[BATCHES // 2]))


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
    """Measures this machine while all ranks compute, and writes it with the link of all_reduce.

    FLOP/s are those of the slowest rank, bytes/s of memory those of all together. Of an older file
    the links of other numbers of ranks stay.
    """
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        dist.barrier()
        slowest = min(from_all(measure_matmul(device, dtype)))
        flops[str(dtype).removeprefix("torch.")] = slowest
    left, right = torch.zeros(2, COPIED_BYTES, dtype=torch.uint8, device=device)
    copy_s, one = seconds_of(lambda: left.copy_(right), device, 1), torch.zeros(1, device=device)
    facts = {
        "cores": cores_per_rank(1),
        "threads": torch.get_num_threads(),
        "flops_per_s": flops,
        "memory_bytes_per_s": dist.get_world_size() * 2 * COPIED_BYTES / copy_s,
        "op_s": seconds_of(lambda: one.add_(1), device, 1000),
        "links": read_json(path)["links"] if path.exists() else {},
    }
    if dist.get_world_size() > 1:
        links = facts["links"].setdefault(dist.get_backend(), {})
        mine = torch.zeros(SMALLEST_BYTES // 4, device=device)
        wait_s = waiting_s(lambda: dist.all_reduce(mine), device)
        links[str(dist.get_world_size())] = fit_link(all_reduce) | {"wait_s": wait_s}
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        fileops.replace(path, json.dumps(facts, indent=1).encode() + b"\n")
        print(f"\nkept in {path}, for python -m gptrain.plan")


def waiting_s(call: Callable[[], Any], device: torch.device) -> float:
    """What a collective takes between products beyond what it takes alone, on the slowest rank.

    On CPUs the ranks come to it one after the other, and its threads wait for a core.
    """
    side = torch.randn(512, 512, device=device)

    def compute() -> None:
        for _ in range(PRODUCTS_BETWEEN):
            side @ side

    def both() -> None:
        compute()
        call()

    alone_s, computing_s, both_s = (
        seconds_of(one, device, calls=20) for one in (call, compute, both)
    )
    return max(0.0, both_s - computing_s - alone_s)


def fit_link(times: list[tuple[int, float]]) -> dict[str, float]:
    """Latency and bytes/s, so that a ring of 2(n - 1) messages takes what all_reduce took."""
    (small, small_s), (large, large_s), n_ranks = times[0], times[-1], dist.get_world_size()
    messages = 2 * (n_ranks - 1)
    rate = messages / n_ranks * (large - small) / max(1e-9, large_s - small_s)
    return {"latency_s": small_s / messages, "bytes_per_s": rate}

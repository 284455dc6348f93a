"""The collectives of torch.distributed, and an all-reduce made of sends and receives, two ways.

A rank's buffer has a row for each of the n ranks: (n, any). Rank 0 is the root.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptrain.core.schema import RunConfig
from gptrain.parallel.mesh import start_group
from gptrain.runtime.devices import find_devices, set_threads
from gptrain.runtime.measure import wait_for
from gptrain.runtime.process import rank_variables, store_path, this_process

BATCHES = 5  # of calls whose time is taken
# What the root and what each other rank gives and gets: n rows, its own, or none. Bus bandwidth is
# (a + b / n) times algorithm bandwidth, bytes of a buffer over seconds; a and b are those of
# github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md. The call; `got` begins as a copy of `mine`.
COLLECTIVES = {
    "broadcast": ("n0", "nn", (1, 0), lambda mine, got: dist.broadcast(got, src=0)),
    "reduce": ("nn", "n0", (1, 0), lambda mine, got: dist.reduce(got, dst=0)),
    "all_reduce": ("nn", "nn", (2, -2), lambda mine, got: dist.all_reduce(got)),
    "scatter": ("n0", "11", (1, -1), lambda mine, got: dist.scatter(got[0], on_root(mine))),
    "gather": ("11", "n0", (1, -1), lambda mine, got: dist.gather(mine[0], on_root(got))),
    "all_gather": ("11", "nn", (1, -1), lambda mine, got: dist.all_gather(list(got), mine[0])),
    "reduce_scatter": ("nn", "11", (1, -1), lambda mine, got: dist.reduce_scatter(got[0], [*mine])),
    "all_to_all": ("nn", "nn", (1, -1), lambda mine, got: dist.all_to_all_single(got, mine)),
}


@contextmanager
def group_of(cfg: RunConfig) -> Generator[torch.device, None, None]:
    """The device of this rank, which is in a group with all others as long as the block runs."""
    machine, rank = find_devices(cfg), this_process().rank
    backend, n_ranks = cfg.strategy.backend or machine.backend, machine.world_size
    device = machine.device(this_process().local_rank)
    set_threads(machine.n_local)
    where = store_path(cfg.run_dir), rank_variables()
    start_group(backend, device, rank, n_ranks, cfg.strategy.timeout_s, *where)
    say(f"{backend}, {n_ranks} ranks; the root is rank 0")
    yield device
    dist.destroy_process_group()


def on_root(rows: Tensor) -> list[Tensor] | None:
    """The rows where the root asks, None elsewhere."""
    return None if dist.get_rank() else list(rows)


def explain(name: str, device: torch.device) -> None:
    """Prints the rows that each rank gives and gets; row j of rank r is the number 10 r + j."""
    gives, gets, _, call = COLLECTIVES[name]
    mine = torch.arange(dist.get_world_size(), device=device).view(-1, 1) + 10.0 * dist.get_rank()
    call(mine, got := mine.clone())
    pictures = from_all((picture(mine, gives), picture(got, gets)))
    width = max(len(before) for before, _ in pictures)
    say(f"\n{name}")
    for rank, (before, after) in enumerate(pictures):
        say(f"  rank {rank}  {before:{width}}  ->  {after}")


def picture(rows: Tensor, shown: str) -> str:
    """[ 10  11 ] for rows of one number each; - for none."""
    n_shown = {"n": len(rows), "1": 1, "0": 0}[shown[min(dist.get_rank(), 1)]]
    words = "".join(f"{number:3.0f} " for number in rows[:n_shown].flatten())
    return f"[{words}]" if words else "-"


def from_all(mine: Any) -> list[Any]:
    """What each rank passes."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def say(line: str) -> None:
    """Rank 0 prints."""
    if dist.get_rank() == 0:
        print(line, flush=True)


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


def all_reduce_by_center(mine: Tensor) -> int:
    """Sums over the ranks, in place, through rank 0; returns the bytes that this rank sent.

    Rank 0 receives and sends the whole buffer n - 1 times, one after another: the more ranks, the
    longer all wait for its link.
    """
    rank, n_ranks, other = dist.get_rank(), dist.get_world_size(), torch.empty_like(mine)
    if rank > 0:
        dist.send(mine, 0)
        dist.recv(mine, 0)
        return mine.nbytes
    for source in range(1, n_ranks):
        dist.recv(other, source)
        mine += other
    for target in range(1, n_ranks):
        dist.send(mine, target)
    return (n_ranks - 1) * mine.nbytes


def all_reduce_by_ring(mine: Tensor) -> int:
    """Sums over the ranks, in place, around a ring; returns the bytes that this rank sent.

    In each of 2(n - 1) steps every rank sends one row to its right and receives one from its left,
    all at once. After n - 1 steps each row is summed on one rank (reduce-scatter), after n - 1 more
    it is on all (all-gather): 2(n - 1)/n of the buffer, however many ranks there are.
    """
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    left, right, received = (rank - 1) % n_ranks, (rank + 1) % n_ranks, torch.empty_like(mine[0])
    for step in range(2 * (n_ranks - 1)):
        row, other = mine[(rank - step) % n_ranks], mine[(rank - step - 1) % n_ranks]
        # In one batch: of two NCCL ranks that each send first neither would come to receive.
        both = [dist.P2POp(dist.isend, row, right), dist.P2POp(dist.irecv, received, left)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if step < n_ranks - 1:
            other += received
        else:
            other.copy_(received)
    return 2 * (n_ranks - 1) * received.nbytes

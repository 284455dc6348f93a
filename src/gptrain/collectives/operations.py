"""The collectives of torch.distributed, and an all-reduce made of sends and receives, two ways.

A rank's buffer has a row for each of the n ranks: (n, any). Rank 0 is the root.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVES = {
    "broadcast": lambda mine, got, is_root: dist.broadcast(mine, src=0),
    "reduce": lambda mine, got, is_root: dist.reduce(mine, dst=0),
    "all_reduce": lambda mine, got, is_root: dist.all_reduce(mine),
    "scatter": lambda mine, got, is_root: dist.scatter(got[0], list(mine) if is_root else None),
    "gather": lambda mine, got, is_root: dist.gather(mine[0], list(got) if is_root else None),
    "all_gather": lambda mine, got, is_root: dist.all_gather(list(got), mine[0]),
    "reduce_scatter": lambda mine, got, is_root: dist.reduce_scatter(got[0], list(mine)),
    "all_to_all": lambda mine, got, is_root: dist.all_to_all_single(got, mine),
}
IN_PLACE = ("broadcast", "reduce", "all_reduce")
ONLY_ROOT_GIVES, ONLY_ROOT_GETS = ("broadcast", "scatter"), ("reduce", "gather")
ONE_ROW_GIVEN, ONE_ROW_GOT = ("gather", "all_gather"), ("scatter", "reduce_scatter")


def run_collective(name: str, mine: Tensor, got: Tensor) -> Tensor | None:
    """Every rank calls it; returns what this one has got, None where only the root gets."""
    is_root = dist.get_rank() == 0
    COLLECTIVES[name](mine, got, is_root)
    if name in ONLY_ROOT_GETS and not is_root:
        return None  # what reduce leaves in a buffer on the way is not defined
    return mine if name in IN_PLACE else got[:1] if name in ONE_ROW_GOT else got


def bus_factor(name: str, n_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth (bytes of the whole buffer over seconds).

    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    share = (n_ranks - 1) / n_ranks
    return {"broadcast": 1, "reduce": 1, "all_reduce": 2 * share}.get(name, share)


def explain(name: str, device: torch.device) -> None:
    """Prints the rows that each rank gives and gets; row j of rank r is the number 10 r + j."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mine = 10.0 * rank + torch.arange(n_ranks, device=device).view(n_ranks, 1)
    given = mine[:1] if name in ONE_ROW_GIVEN else mine
    before = picture(None if name in ONLY_ROOT_GIVES and rank else given)
    after = picture(run_collective(name, mine, torch.zeros_like(mine)))
    pictures: list[tuple[str, str]] = [("", "")] * n_ranks
    dist.all_gather_object(pictures, (before, after))
    width = max(len(before) for before, _ in pictures)
    say(f"\n{name}")
    for number, (before, after) in enumerate(pictures):
        say(f"  rank {number}  {before:{width}}  ->  {after}")


def picture(rows: Tensor | None) -> str:
    """[ 10  11 ] for rows of one number each; - for nothing."""
    return "-" if rows is None else "[" + "".join(f"{row:3.0f} " for row in rows.flatten()) + "]"


def say(line: str) -> None:
    """Rank 0 prints."""
    if dist.get_rank() == 0:
        print(line, flush=True)


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
    rank, n_ranks, sent_bytes = dist.get_rank(), dist.get_world_size(), 0
    left, right, received = (rank - 1) % n_ranks, (rank + 1) % n_ranks, torch.empty_like(mine[0])
    for step in range(2 * (n_ranks - 1)):
        row, other = mine[(rank - step) % n_ranks], mine[(rank - step - 1) % n_ranks]
        # In one batch: of two NCCL ranks that each send first neither would come to receive.
        both = [dist.P2POp(dist.isend, row, right), dist.P2POp(dist.irecv, received, left)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        sent_bytes += row.nbytes
        if step < n_ranks - 1:
            other += received
        else:
            other.copy_(received)
    return sent_bytes

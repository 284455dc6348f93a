"""The data that a rank sends in an optimizer step, over which axis, and what is overlapped.

A strategy states its traffic in `costs.strategies`, an optimizer in `costs.optimizers`.

Collectives are taken as rings, whose traffic is the least possible (Patarasuk & Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002): of b bytes that each of n ranks holds, or will hold, whole, a rank
sends (n-1)/n b in an all-gather or a reduce-scatter and twice that in an all-reduce. Logging,
clipping and the vote on stopping send some hundred bytes and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gptrain.costs.work import Work


class Traffic(NamedTuple):
    """The data of one kind that a rank sends in an optimizer step.

    Attributes:
        what: Name of the kind, for the output of the planner.
        axis: Axis of the device mesh over which the data is sent.
        n_bytes: Bytes that one rank sends.
        calls: Number of collectives.
        hops: Number of messages of one collective that follow each other.
        exposed: Fraction of the traffic that cannot overlap with computation.
        room: Fraction of the step's computation that the rest can overlap with.
    """

    what: str
    axis: str
    n_bytes: float
    calls: float
    hops: int = 1
    exposed: float = 1.0
    room: float = 0.0


def gather_bytes(n_bytes: float, n_ranks: int) -> float:
    """Return what a rank sends to all-gather or reduce-scatter n_bytes: (n-1)/n of them."""
    return n_bytes * (n_ranks - 1) / n_ranks


def all_reduce_bytes(n_bytes: float, n_ranks: int) -> float:
    """Return the bytes that a rank sends to all-reduce n_bytes: reduce-scatter, then all-gather."""
    return 2 * gather_bytes(n_bytes, n_ranks)


def find_traffic(work: Work) -> list[Traffic]:
    """Return what a rank sends in an optimizer step. The list is empty on one device."""
    sent = (*work.costs.traffic(work), *work.optimizer.traffic(work))
    return [traffic for traffic in sent if traffic.n_bytes]

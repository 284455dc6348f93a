"""The data that a rank sends in an optimizer step, over which axis, and what is overlapped.

A strategy states its traffic in `costs.strategies`, an optimizer in `costs.optimizers`.

Collectives count as rings, which send the fewest bytes possible (Patarasuk & Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002). For a tensor of b bytes on n ranks, each rank sends (n-1)/n b in an
all-gather or a reduce-scatter, and 2 (n-1)/n b in an all-reduce. Logging, gradient clipping and the
agreement on stopping send some hundred bytes and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gptrain.costs.work import Work


class Traffic(NamedTuple):
    """The data of one kind, such as gradients, that a rank sends in an optimizer step.

    Attributes:
        what: Name of the kind, for the output of the planner.
        axis: Axis of the device mesh over which the data is sent.
        n_bytes: Bytes that one rank sends.
        calls: Number of collectives in a step.
        hops: Number of messages of one collective that follow each other.
        exposed: Fraction of the traffic that cannot overlap with computation.
        overlap: Fraction of the step's computation during which the remaining traffic can be sent.
    """

    what: str
    axis: str
    n_bytes: float
    calls: float
    hops: int = 1
    exposed: float = 1.0
    overlap: float = 0.0


def gather_bytes(n_bytes: float, n_ranks: int) -> float:
    """Return the bytes that a rank sends to all-gather or reduce-scatter a tensor.

    Args:
        n_bytes: Size of the full tensor, in bytes.
        n_ranks: Number of ranks, n. A rank sends (n-1)/n of the tensor.
    """
    return n_bytes * (n_ranks - 1) / n_ranks


def all_reduce_bytes(n_bytes: float, n_ranks: int) -> float:
    """Return the bytes that a rank sends to all-reduce a tensor: reduce-scatter, then all-gather.

    Args:
        n_bytes: Size of the tensor, in bytes.
        n_ranks: Number of ranks, n. A rank sends 2 (n-1)/n times the size of the tensor.
    """
    return 2 * gather_bytes(n_bytes, n_ranks)


def find_traffic(work: Work) -> list[Traffic]:
    """Return all data that a rank sends in an optimizer step: for its strategy and its optimizer.

    Entries without bytes are left out, so that the list is empty on one device.

    Args:
        work: Facts about the rank's optimizer step.
    """
    entries = (*work.costs.traffic(work), *work.optimizer.traffic(work))
    return [entry for entry in entries if entry.n_bytes]

"""Bytes that this rank sends, counted while it sends them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class CountBytes(TorchDispatchMode):
    """Inside the block, `sent` grows by what every collective sends, taken as a ring's.

    Collectives pass torch's dispatcher, DDP's and FSDP's own as well; of DTensor's those that
    gather, not the norms of a clip. Of b bytes that n ranks hold or will hold whole, a ring sends
    (n-1)/n b per rank in an all-gather, a reduce-scatter or a broadcast, and twice that in an
    all-reduce (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).

    Attributes:
        sent: name of the operation -> bytes.   calls: -> how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> float:
        """Bytes of all operations."""
        return sum(self.sent.values())

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            name = op._opname.strip("_")
            self.sent[name] += _sent(name, args)
            self.calls[name] += 1
        elif op.namespace == "_c10d_functional" and op._opname == "all_gather_into_tensor":
            self.sent["allgather_dtensor"] += args[0].nbytes * (args[1] - 1)  # the group's size
        return op(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> float:
    if name in ("allreduce", "broadcast"):
        size = dist.ProcessGroup.unbox(args[1]).size()
        rounds = 2 if name == "allreduce" else 1
        return rounds * sum(tensor.nbytes for tensor in args[0]) * (size - 1) / size
    if name in ("allgather_base", "reduce_scatter_base"):
        return abs(args[0].nbytes - args[1].nbytes)  # output and input, one a part of the other
    if name == "send":
        return sum(tensor.nbytes for tensor in args[0])
    if name in ("recv", "barrier"):
        return 0
    raise NotImplementedError(f"bytes of {name} are not counted yet")

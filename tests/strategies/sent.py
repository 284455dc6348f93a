"""Counter of the bytes that a running step sends."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "send")


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives inside a `with` block.

    Collectives count as rings. For a tensor of b bytes on n ranks, a rank sends (n-1)/n b in an
    all-gather, a reduce-scatter or an all-to-all, as much on average in a broadcast, and 2 (n-1)/n
    b in an all-reduce (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). The counter sees the
    collectives of DDP, FSDP and DTensor, because they all pass through torch's dispatcher.

    Attributes:
        n_bytes: Bytes that this rank sent, by kind of collective, such as `allreduce`.
        calls: Number of calls, by kind of collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = dict.fromkeys(COLLECTIVES, 0.0)
        self.calls = dict.fromkeys(COLLECTIVES, 0)

    @property
    def total(self) -> float:
        """Bytes that this rank sent in all collectives together."""
        return sum(self.n_bytes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # the dispatch of DTensor calls collectives of plain tensors
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname.strip("_").replace("_", "")
            for kind in COLLECTIVES:
                if name.startswith(kind):
                    self.n_bytes[kind] += _sent_bytes(kind, args, out)
                    self.calls[kind] += 1
        return out


def _sent_bytes(kind: str, args: Any, out: Any) -> float:
    """Return the bytes that a rank sends in one collective.

    Args:
        kind: Kind of the collective, one of COLLECTIVES, such as `allreduce`.
        args: Arguments of the operation. Operations of `c10d` change their arguments in place.
        out: Result of the operation. Operations of `_c10d_functional` return the new tensor.
    """
    if kind in ("allgather", "reducescatter"):
        # One tensor is the full tensor, the other the shard of a rank: (n-1)/n b is the difference.
        first, second = args[:2] if isinstance(args[1], Tensor) else (args[0], out)
        return abs(first.nbytes - second.nbytes)
    tensors = args[0] if isinstance(args[0], list) else [args[0]]
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    if kind == "send":
        return n_bytes
    names = [argument for argument in args if isinstance(argument, str)]
    if names:  # `_c10d_functional`: the name of the group is the last string
        size = dist.distributed_c10d._resolve_process_group(names[-1]).size()
    else:  # the group is the first object of C++
        group = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
        size = dist.ProcessGroup.unbox(group).size()
    return (2 if kind == "allreduce" else 1) * n_bytes * (size - 1) / size

"""What a step sends and multiplies, counted while it runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_flop_count

COLLECTIVES = ("allreduce", "allgather", "reducescatter", "broadcast", "send")


class Sent(TorchDispatchMode):
    """Inside the block, counts what this rank sends; collectives are taken as rings.

    Of b bytes that n ranks hold or will hold whole a rank sends (n-1)/n b in an all-gather or a
    reduce-scatter, on average in a broadcast, twice that in an all-reduce (Patarasuk & Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002). Collectives of DDP, FSDP and DTensor pass torch's dispatcher.

    Attributes:
        n_bytes: of each of COLLECTIVES.   calls: how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = dict.fromkeys(COLLECTIVES, 0.0)
        self.calls = dict.fromkeys(COLLECTIVES, 0)

    @property
    def total(self) -> float:
        """Bytes of all."""
        return sum(self.n_bytes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its own dispatch calls the collectives
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname.strip("_").replace("_", "")
            for kind in COLLECTIVES:
                if name.startswith(kind):
                    self.n_bytes[kind] += _sent_bytes(kind, args, out)
                    self.calls[kind] += 1
        return out


def _sent_bytes(kind: str, args: Any, out: Any) -> float:
    """Of a collective that changes its arguments, or returns its result."""
    if kind in ("allgather", "reducescatter"):
        here, there = args[:2] if isinstance(args[1], Tensor) else (args[0], out)
        return abs(here.nbytes - there.nbytes)  # one is a part of the other
    n_bytes = sum(one.nbytes for one in (args[0] if isinstance(args[0], list) else [args[0]]))
    if kind == "send":
        return n_bytes
    if isinstance(args[1], str):  # the operation, and then the group's name
        size = dist.distributed_c10d._resolve_process_group(args[2]).size()
    else:
        size = dist.ProcessGroup.unbox(args[1]).size()
    return (2 if kind == "allreduce" else 1) * n_bytes * (size - 1) / size


def _product(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return 2 * sdpa_flop_count(q, k, v)  # without what the kernel computes again


# What torch's counter does not know: the chunked loss adds products in place; the CPU's attention.
FLOPS = {
    torch.ops.aten.addmm_: _product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}

"""Learned positions of a checkpoint whose sequences have another length than the net's."""

from collections.abc import Mapping
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from gptrain.parallel.placement import copy_from_full, full_tensor

Shapes = Mapping[str, tuple[int, ...]]
TABLE = "position_embedding"  # a role of tensor_plan


def find_tables(net: nn.Module, here: Shapes, there: Shapes) -> dict[str, int | None]:
    """Return the tensors of a net that differ from a checkpoint's in the number of positions alone.

    A net with a `tensor_plan` names its tables by their role. In any other net with a `max_seq_len`
    a table is a tensor that differs in dimensions of that size, and in the same way as all others.

    Args:
        here: Name -> shape of the net's tensors.
        there: Name -> shape of the checkpoint's tensors.

    Returns:
        Name -> dimension of the positions; None for a buffer, whose values the net computes.
    """
    length, buffers = getattr(net, "max_seq_len", None), dict(net.named_buffers())
    plan = getattr(net, "tensor_plan", None)
    tables: dict[str, int | None] = {}
    old_lengths = set()
    for name, shape in here.items():
        old = there.get(name, shape)
        if len(old) != len(shape) or old == shape:
            continue
        dims = [dim for dim, size in enumerate(shape) if old[dim] != size]
        old_lengths |= {old[dim] for dim in dims}
        if any(shape[dim] != length for dim in dims):
            continue
        if name in buffers:
            tables[name] = None
        elif len(dims) == 1 and is_table(name, plan, length, getattr(net, "vocab_size", None)):
            tables[name] = dims[0]
    return tables if plan is not None or len(old_lengths) == 1 else {}


def is_table(
    name: str, plan: Mapping[str, str] | None, length: int | None, vocab_size: int | None
) -> bool:
    """Return whether a parameter whose size is max_seq_len may be a table of positions."""
    if plan is None:
        return length != vocab_size  # else it may as well be a table of tokens
    owner = name.rpartition(".")[0]
    role = next((role for pattern, role in plan.items() if fnmatch(owner, pattern)), None)
    return role == TABLE


@torch.no_grad()
def fill_positions(target: Tensor, source: Tensor, dim: int) -> None:
    """Copy the first positions of a full tensor into a tensor or a shard, and leave the others.

    Ranks that hold shards of one tensor must all call it.
    """
    full = full_tensor(target).clone()
    n_positions = min(full.shape[dim], source.shape[dim])
    full.narrow(dim, 0, n_positions).copy_(source.narrow(dim, 0, n_positions))
    copy_from_full(target, full)

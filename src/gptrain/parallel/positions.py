"""Load learned positions from a checkpoint with another sequence length than the net."""

from collections.abc import Mapping
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from gptrain.parallel.placement import copy_from_full, full_tensor

Shapes = Mapping[str, tuple[int, ...]]
TABLE = "position_embedding"  # role in tensor_plan


def find_tables(net: nn.Module, net_shapes: Shapes, saved_shapes: Shapes) -> dict[str, int | None]:
    """Find the tensors whose shapes in net and checkpoint differ in the number of positions only.

    Returns:
        Name -> dimension of the positions. The dimension is None for a buffer: the net computes its
        values, nothing is loaded.
    """
    length = getattr(net, "max_seq_len", None)
    buffers = dict(net.named_buffers())
    plan = getattr(net, "tensor_plan", None)
    tables: dict[str, int | None] = {}
    old_lengths = set()
    for name, shape in net_shapes.items():
        old = saved_shapes.get(name, shape)
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
    """Return whether a parameter with a dimension of size max_seq_len is a table of positions.

    In a net with `tensor_plan` its role decides. In any other net it is one, unless the vocabulary
    has the same size: then it could also be the table of tokens.
    """
    if plan is None:
        # If both sizes are equal, the parameter could be the table of tokens.
        return length != vocab_size
    owner = name.rpartition(".")[0]
    role = next((role for pattern, role in plan.items() if fnmatch(owner, pattern)), None)
    return role == TABLE


@torch.no_grad()
def fill_positions(target: Tensor, source: Tensor, dim: int) -> None:
    """Copy the first positions of `source` into `target`, as many as both have.

    All other values of `target` stay.
    """
    full = full_tensor(target).clone()
    n_positions = min(full.shape[dim], source.shape[dim])
    full.narrow(dim, 0, n_positions).copy_(source.narrow(dim, 0, n_positions))
    copy_from_full(target, full)

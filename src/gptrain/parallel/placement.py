"""Full tensors and the shards that ranks hold: building a partitioned net, copying."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gptrain.parallel.requirements import tied_names


def build_on_meta_device(make_net: Callable[[], nn.Module]) -> nn.Module:
    """Build the net on the meta device, or on the CPU if its constructor needs real values.

    `make_net` may be called twice, and its errors pass. It may change the state of torch's global
    random generators.
    """
    rng_state = torch.random.get_rng_state()
    try:
        with torch.device("meta"):
            return make_net()
    except (RuntimeError, TypeError, ValueError):  # such as a constructor that calls .item()
        torch.random.set_rng_state(rng_state)
        return make_net()


def make_net_on(
    device: torch.device | str,
    make_net: Callable[[], nn.Module],
    partition: Callable[[nn.Module], None],
) -> nn.Module:
    """Build the net, partition it in place, and initialize its weights on a device.

    A net with `init_parameter` and without buffers is partitioned on the meta device, and its
    parameters are initialized one after another: a rank never holds more than its own shards and
    one full parameter. Any other net is built in full on the CPU, and then partitioned.

    The weights are those that a single process gets from the same state of torch's global CPU
    generator, and the generator ends in the same state. There is no communication, unless
    `partition` communicates.

    Args:
        device: Device of the weights.
        make_net: Function that builds the full net. It may be called twice.
        partition: Function that partitions the full net in place, on the meta device or the CPU.
    """
    rng_state = torch.random.get_rng_state()
    net = build_on_meta_device(make_net)
    # The values of a buffer that was built on the meta device would be lost.
    if not hasattr(net, "init_parameter") or any(True for _ in net.buffers()):
        if any(tensor.is_meta for tensor in (*net.parameters(), *net.buffers())):
            torch.random.set_rng_state(rng_state)
            net = make_net()
        partition(net)
        return net.to(device)
    partition(net)
    allocate(net, device)
    for name, parameter in net.named_parameters():
        full = torch.empty(parameter.shape, dtype=parameter.dtype)
        cast(Any, net).init_parameter(name, full)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            full = distribute_tensor(full.detach(), mesh, placements, src_data_rank=None)
        local_shard(parameter.detach()).copy_(local_shard(full.detach()))
    return net


def allocate(net: nn.Module, device: torch.device | str) -> None:
    """Move a net to a device, in place, without the values of its parameters and buffers.

    The values are undefined afterwards. Tied parameters stay tied, unlike with `to_empty`.
    """
    tied = tied_names(net)
    net.to_empty(device=device)  # creates a separate parameter for each name of a tied parameter
    for second, first in tied.items():
        owner, _, name = second.rpartition(".")
        setattr(net.get_submodule(owner), name, net.get_parameter(first))


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, on whose mesh it is collective, or a plain tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

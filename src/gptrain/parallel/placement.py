"""Whole tensors and the slices that ranks hold: to make a net of slices, to fill, to gather.

Slices are DTensor's: torch.chunk's, so that all ranks hold the same number of rows, the last ones
fewer or none.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gptrain.parallel.requirements import tied_names


def build_on_meta_device(make_net: Callable[[], nn.Module]) -> nn.Module:
    """The net on the meta device, without memory; on the CPU where its class needs real numbers."""
    before = torch.random.get_rng_state()
    try:
        with torch.device("meta"):
            return make_net()
    except (RuntimeError, TypeError):  # of `x.item() for x in torch.linspace(0, 1, n)`, `.numpy()`
        torch.random.set_rng_state(before)
        return make_net()


def make_net_on(
    device: torch.device | str,
    make_net: Callable[[], nn.Module],
    partition: Callable[[nn.Module], None],
) -> nn.Module:
    """Net made by make_net, partitioned in place by partition(net), with weights on device.

    A net with `init_parameter` and without buffers is made and partitioned on the meta device and
    filled one parameter at a time: a rank never holds more than its slices and one whole parameter.
    Any other net is made whole on the CPU, then partitioned.
    Both draw from the global CPU generator what one call of make_net draws, so the same seed gives
    the weights of a single process.
    """
    before = torch.random.get_rng_state()
    net = build_on_meta_device(make_net)
    if not can_init_by_parameter(net):
        if any(tensor.is_meta for tensor in (*net.parameters(), *net.buffers())):
            torch.random.set_rng_state(before)
            net = make_net()
        partition(net)
        return net.to(device)
    first_name = tied_names(net)  # also of a weight whose first name this rank does not hold
    partition(net)
    allocate(net, device)
    for name, parameter in net.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        cast(Any, net).init_parameter(first_name.get(name, name), whole)
        copy_from_full(parameter, whole)
    return net


def can_init_by_parameter(net: nn.Module) -> bool:
    """Whether its weights can be drawn one by one, after it was made on the meta device."""
    return hasattr(net, "init_parameter") and not any(True for _ in net.buffers())


def allocate(net: nn.Module, device: torch.device | str) -> None:
    """Gives tensors without values to a net of the meta device; a tied one stays one."""
    tied = tied_names(net)
    net.to_empty(device=device)  # makes a parameter of each name, also of a tied one
    for second, first in tied.items():
        owner, _, name = second.rpartition(".")
        setattr(net.get_submodule(owner), name, net.get_parameter(first))


@torch.no_grad()
def copy_from_full(target: Tensor, whole: Tensor) -> None:
    """Copy whole into a plain tensor, or this rank's slice of it into a DTensor; no communication.

    Raises: ValueError if the shapes differ.
    """
    if target.shape != whole.shape:
        raise ValueError(f"shapes differ: {tuple(target.shape)} here, {tuple(whole.shape)} given")
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        whole = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
    local_shard(target).copy_(local_shard(whole))


def shard_like(value: Any, parameter: Tensor) -> Any:
    """This rank's slice of a whole tensor of the parameter's shape; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    mine = torch.empty_like(parameter.detach(), dtype=value.dtype)
    copy_from_full(mine, value)
    return mine


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank; a plain tensor as it is. Collective."""
    if isinstance(tensor, DTensor):  # an offloaded one lies where its mesh cannot gather it
        tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
    return tensor.detach()

"""A whole net: on one device, or on each of several ranks."""

from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gptrain.lit.strategies.base import BuildArgs
from gptrain.lit.strategies.states import NamedStates
from gptrain.parallel.mesh import build_mesh
from gptrain.parallel.slices import make_net_on

SYNC_BUFFERS = (  # renamed in torch 2.13
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class SingleDevice(NamedStates, SingleDeviceStrategy):
    """One device."""


class Ranks(NamedStates, DDPStrategy):
    """Several ranks, whose process group exists already.

    Lightning would seed every rank alike here, and dropout with it.
    """

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self.data_group = self.data_group or dist.group.WORLD


class DDP(Ranks):
    """A whole net on every rank, gradients averaged while they are formed.

    Args:
        comm: of `comm_hook`; Lightning registers hooks on GPUs only.
    """

    def __init__(self, comm: tuple[object, Callable] | None, **options: Any):
        super().__init__(**options)
        self.comm = comm

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self.comm is not None:
            cast(DistributedDataParallel, self.model).register_comm_hook(*self.comm)


def comm_hook(name: str) -> tuple[object, Callable] | None:
    """(state, hook) for DistributedDataParallel.register_comm_hook; None for "none".

    "bf16" and "fp16" send half of the bytes and round each gradient once. "powersgd" sends factors
    of rank 1 with error feedback (Vogels et al. 2019, arXiv:1905.13727), after 1000 steps of plain
    all-reduce in which training settles: torch's own defaults.
    """
    if name == "none":
        return None
    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook
    return None, {"bf16": _bf16, "fp16": default_hooks.fp16_compress_hook}[name]


def _bf16(group, bucket):
    # DDP refuses torch's hook by its name where the backend is gloo, which has known bf16 since.
    return default_hooks.bf16_compress_hook(group, bucket)


def build_single(args: BuildArgs) -> tuple[nn.Module, Strategy]:
    """The net on its device."""
    return make_net_on(args.device, args.make_net, args.finish), SingleDevice(args.device)


def build_ddp(args: BuildArgs) -> tuple[nn.Module, Strategy]:
    """A copy of the net on every rank; options of ddp, or of auto."""
    options = args.options
    strategy = DDP(
        comm_hook(options.comm_hook),
        **{SYNC_BUFFERS: False},  # ours are constants
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
    )
    strategy.replicas = build_mesh(args.device.type, args.dims)["data"]
    return make_net_on(args.device, args.make_net, args.finish), strategy

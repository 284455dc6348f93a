"""Data parallelism by torch's DistributedDataParallel (DDP): a full net on every rank.

DDP averages the gradients over the ranks during the backward pass.
"""

from collections.abc import Callable
from inspect import signature

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gptrain.core.strategies import DDPOptions
from gptrain.parallel.mesh import build_mesh
from gptrain.parallel.strategy import ParallelStrategy

# Argument of DistributedDataParallel that broadcasts buffers before each forward pass. torch 2.13
# renamed the argument. LightningStrategy.synchronize_buffers does it once per step.
SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
# Options of the strategy that DistributedDataParallel takes as arguments of the same names
ARGUMENTS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")


class Replicated(ParallelStrategy[DDPOptions]):
    """Train a copy of the net on every rank; DistributedDataParallel averages the gradients.

    All ranks must call the constructor, which creates the device mesh.
    """

    def __post_init__(self):
        self.data_group = dist.group.WORLD
        self.replicas = build_mesh(self.device.type, self.dims)["data"]
        self.comm_hook = build_comm_hook(self.options.comm_hook)
        self.ddp_arguments = {key: getattr(self.options, key) for key in ARGUMENTS}
        self.ddp_arguments[SYNC_BUFFERS] = False


def build_comm_hook(name: str) -> tuple[object, Callable] | None:
    """Build the arguments (state, hook) of DistributedDataParallel.register_comm_hook.

    Args:
        name: Value of `strategy.comm_hook`. "bf16" and "fp16" send half of the bytes and round each
            gradient once. "powersgd" sends factors of rank 1 with error feedback after 1000 steps
            of plain all-reduce, with torch's default options. Source: Vogels et al. 2019,
            arXiv:1905.13727.

    Returns:
        State and hook, or None for "none".

    Raises:
        KeyError: If the name is none of these.
    """
    if name == "none":
        return None
    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook
    return None, {"bf16": _bf16_compress, "fp16": default_hooks.fp16_compress_hook}[name]


def _bf16_compress(group, bucket):
    """Return the result of torch's bf16_compress_hook, as a hook with another name.

    DDP with gloo refuses the hook by its name, although gloo supports bf16 now.
    """
    return default_hooks.bf16_compress_hook(group, bucket)

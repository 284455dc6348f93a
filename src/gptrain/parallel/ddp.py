"""A whole net on every rank: options of DistributedDataParallel, which averages the gradients."""

from collections.abc import Callable
from inspect import signature

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gptrain.core.strategies import DDPOptions
from gptrain.parallel.mesh import build_mesh
from gptrain.parallel.strategy import ParallelStrategy

SYNC_BUFFERS = (  # renamed in torch 2.13
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)  # ours are constants
OPTIONS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")


class Replicated(ParallelStrategy[DDPOptions]):
    """A copy of the net on every rank, gradients averaged while they are formed."""

    def __post_init__(self):
        self.data_group = dist.group.WORLD
        self.replicas = build_mesh(self.device.type, self.dims)["data"]
        self.comm = comm_hook(self.options.comm_hook)
        self.ddp = {key: getattr(self.options, key) for key in OPTIONS} | {SYNC_BUFFERS: False}

    @property
    def sent_dtype(self) -> torch.dtype | None:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.options.comm_hook)


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

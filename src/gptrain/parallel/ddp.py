"""How data-parallel ranks send their gradients: whole, halved, or as low-rank factors."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


def comm_hook(name: str, group: dist.ProcessGroup | None = None) -> tuple[object, Callable] | None:
    """(state, hook) for DistributedDataParallel.register_comm_hook; None for "none".

    "bf16" and "fp16" send half of the bytes and round each gradient once. "powersgd" sends factors
    of rank 1 with error feedback (Vogels et al. 2019, arXiv:1905.13727), after 1000 steps of plain
    all-reduce in which training settles: torch's own defaults.
    """
    if name == "none":
        return None
    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(group), powerSGD_hook.powerSGD_hook
    return group, {"bf16": _bf16, "fp16": default_hooks.fp16_compress_hook}[name]


def _bf16(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    # DDP refuses torch's hook by its name where the backend is gloo, which has known bf16 since.
    return default_hooks.bf16_compress_hook(group, bucket)

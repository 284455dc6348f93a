"""The process group of a job, made before Lightning would make one of its own."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

STORE_VARIABLE = "GPTRAIN_STORE"  # a file that the ranks of one node meet at


def start_group(
    backend: str, device: torch.device, rank: int, world_size: int, timeout_s: float
) -> None:
    """Joins the job's ranks; does nothing where they have been joined already.

    Ranks that our own supervisor started meet at a file, and gloo talks over loopback, so that a
    run on one node opens no port that others could reach; torchrun and SLURM bring an address.
    """
    if dist.is_initialized() or world_size == 1:
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = os.environ.get(STORE_VARIABLE)
    if store:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        init_method=f"file://{store}" if store else "env://",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def stop_group() -> None:
    """Leaves the job's ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()

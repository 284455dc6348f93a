"""The process group of a job, made before Lightning would make one of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

STORE_VARIABLE = "GPTRAIN_STORE"  # a file that the ranks of one node meet at


def start_group(
    backend: str, device: torch.device, rank: int, world_size: int, timeout_s: float
) -> None:
    """Joins the job's ranks; does nothing where they have been joined already.

    Ranks that our own supervisor started meet at a file, and gloo talks over loopback, so that a
    run on one node opens no port that others could reach; ranks of several nodes have MASTER_ADDR.
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
        # NCCL then knows this rank's GPU; else barriers guess it by the rank, and warn.
        device_id=device if backend == "nccl" else None,
    )


def start_group_of_one(device: torch.device) -> None:
    """A group of this process alone, for a strategy of several tried on one device."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def after_rank_0(make: Callable[[], T], rank: int, timeout_s: float) -> T:
    """What `make` returns, called on rank 0 first: it may leave files that the others then find.

    The others wait at the store, not in a collective: preparing a corpus may outlast the timeout
    of collectives by hours.
    """
    if not dist.is_initialized():
        return make()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        made = make()
        store.set("rank 0 is ready", "1")
        return made
    store.wait(["rank 0 is ready"], timedelta(seconds=timeout_s))
    return make()


def from_rank_0(value: T) -> T:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]

"""The ranks of a job: their process group, and the axes along which they divide the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gptrain.core.strategies import DATA, PIPELINE, TENSOR, ParallelDims
from gptrain.parallel.rendezvous import open_store

T = TypeVar("T")

# Outermost to innermost. Ranks of one tensor group are neighbours, because they talk most and one
# node's links are the fastest; stages of a pipeline talk least and may lie far apart.
AXES = (PIPELINE, DATA, TENSOR)


def build_mesh(device_type: str, dims: ParallelDims) -> DeviceMesh:
    """Mesh with the axes "pipeline", "data" and "tensor", one group of ranks along each.

    Every rank must call it, after the process group exists.
    """
    sizes = tuple(getattr(dims, axis) for axis in AXES)
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


def build_shard_mesh(mesh: DeviceMesh, dims: ParallelDims) -> DeviceMesh:
    """The mesh over which FSDP shards: the data axis, or with replicas two axes in its place.

    Ranks that share one copy of the net are neighbours: they gather weights, and a node's links
    are the fastest; the copies exchange gradients alone. Every rank must call it.
    """
    if dims.replicas == 1:
        return mesh["data"]
    sizes = (dims.replicas, dims.data // dims.replicas)
    return init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("replicate", "shard"))


def start_group(
    backend: str,
    device: torch.device,
    rank: int,
    world_size: int,
    timeout_s: float,
    store_path: str | None = None,
    variables: Sequence[str] = (),
) -> None:
    """Create the job's process group, before Lightning would; do nothing where one exists.

    Ranks of one node use a file store, and gloo talks over loopback, so that no port is opened that
    others could reach; ranks of several nodes have MASTER_ADDR.

    Args:
        variables: Names of the environment variables that number the ranks.

    Raises:
        MissingRanksError: If not all ranks come.
    """
    if dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store_path:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if world_size == 1:  # a strategy tried on one device
        store: dist.Store = dist.HashStore()
    else:
        store = open_store(rank, world_size, timeout_s, store_path, variables)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        # NCCL then knows this rank's GPU; else barriers guess it by the rank, and warn.
        device_id=device if backend == "nccl" else None,
    )


def after_rank_0(make: Callable[[], T], rank: int, timeout_s: float) -> T:
    """What `make` returns, called on rank 0 first: it may write files that the others then read.

    The others wait for a key of the store, not in a collective: preparing a corpus may take hours
    longer than the timeout of collectives.
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


def wait_for_rank_0(finish: Callable[[], None], rank: int, timeout_s: float) -> None:
    """Returns on all ranks once rank 0 has done what only it does; or is gone, or was too slow.

    Call it once, at the end: whoever waits here has no collective that another rank might miss.
    """
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    if rank == 0:
        finish()
    if store is not None:
        with suppress(RuntimeError):
            if rank == 0:
                store.set("rank 0 has finished", "1")
            store.wait(["rank 0 has finished"], timedelta(seconds=timeout_s))


def from_rank_0(value: T) -> T:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]

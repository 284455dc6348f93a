"""Process group and device mesh of a job, and functions that pass plain values among its ranks."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gptrain.core.strategies import CONTEXT, DATA, PIPELINE, TENSOR, ParallelDims

T = TypeVar("T")
LONG_PHASE_S = 3600.0  # time that compiling or writing a checkpoint may take, in seconds

# Axes, the outermost first. Tensor parallelism communicates most, so the ranks of a tensor group
# are neighbours, which usually share a node and its fast links. Ranks that share a sequence come
# next. Pipeline stages communicate least and may be on different nodes.
_AXES = (PIPELINE, DATA, CONTEXT, TENSOR)


def build_mesh(device_type: str, dims: ParallelDims) -> DeviceMesh:
    """Build the mesh with the axes "pipeline", "data", "context" and "tensor". Collective.

    An axis of one rank is an axis, too. `device_type` is torch's, such as "cuda".
    """
    sizes = tuple(getattr(dims, axis) for axis in _AXES)
    return init_device_mesh(device_type, sizes, mesh_dim_names=_AXES)


def build_shard_mesh(mesh: DeviceMesh, dims: ParallelDims) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards the parameters. All ranks must call it.

    It is the data axis of `mesh`. With several context ranks it has one axis of all ranks, and with
    several replicas (HSDP) the axes "replicate" and "shard".

    Args:
        mesh: Result of `build_mesh`.
        dims: Number of ranks along each axis, and of replicas.
    """
    if dims.context > 1:
        return init_device_mesh(mesh.device_type, (dims.gradient_ranks,), mesh_dim_names=("shard",))
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
    store: dist.Store,
    is_one_node: bool = True,
) -> None:
    """Create the process group of the job, unless one exists. All ranks must call it.

    The caller destroys the group (`runtime.launch.run_rank`).

    Args:
        backend: Backend of torch.distributed, for example "nccl".
        device: Device of this rank. A CUDA device becomes the current device.
        rank: Rank of this process in the job.
        world_size: Number of ranks of the job.
        timeout_s: Time for which a rank waits for the others, and timeout of the collectives, which
            with NCCL is at least an hour.
        store: Store through which the ranks find each other (`runtime.store.start_store`).
        is_one_node: True lets gloo and NCCL use the loopback interface, unless an environment
            variable names another, so that no port can be reached from other machines.

    Raises:
        TimeoutError: If not all ranks call it in time.
    """
    if dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if is_one_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store.add("ranks", 1)
    _wait_until(lambda: store.add("ranks", 0) >= world_size, f"all {world_size} ranks", timeout_s)
    if "nccl" in backend:
        # NCCL ends the process without a message. The watchdog comes first, which allows an hour
        # for compiling and for writing a checkpoint.
        timeout_s = max(timeout_s, LONG_PHASE_S) + 60
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        # Without device_id, barriers of NCCL guess the GPU from the rank, with a warning.
        device_id=device if backend == "nccl" else None,
    )


def after_rank_0(
    function: Callable[[], T], rank: int, timeout_s: float, key: str = "rank 0 is ready"
) -> T:
    """Call a function on rank 0 first, then on all other ranks, and return its result.

    All ranks call it, once per process group and key, because the key stays set. The other ranks
    wait without a collective, whose timeout would be too short to prepare a corpus. Without a
    process group the function is only called.

    Args:
        function: Function without arguments. It may write files that the other ranks then read.
        rank: Rank of this process.
        timeout_s: Time for which the other ranks wait.
        key: Key of the store that rank 0 sets when the function has returned.

    Raises:
        TimeoutError: On the other ranks, if rank 0 fails or does not return within `timeout_s`.
        RuntimeError: On the other ranks, if the store has ended (DistNetworkError).

    Errors of the function pass unchanged.
    """
    if not dist.is_initialized():
        return function()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        result = function()
        store.set(key, "1")
        return result
    _wait_until(lambda: store.check([key]), "rank 0", timeout_s)
    return function()


def _wait_until(is_true: Callable[[], bool], ranks: str, timeout_s: float) -> None:
    """Wait until `is_true()`, or raise a TimeoutError that names `ranks`. Signal handlers run."""
    end_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited for {ranks} for {timeout_s:g} s")
        time.sleep(0.02)


def wait_for_rank_0(finish: Callable[[], None], rank: int) -> None:
    """Call `finish` on rank 0 only, and return on all ranks when it has returned.

    All ranks call it, once, at the end of the run: a second call would not wait. Waiting ranks take
    part in no collective. They also return if rank 0 has exited, or after `LONG_PHASE_S`.
    Errors of `finish` are raised on rank 0.
    """
    ignored = () if rank == 0 else (RuntimeError, TimeoutError)
    with suppress(*ignored):
        # bool does nothing on the ranks that have waited
        after_rank_0(finish if rank == 0 else bool, rank, LONG_PHASE_S, "rank 0 has finished")


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank. Collective. The values of all ranks must be picklable.

    Without a process group `value` is returned.
    """
    return gather(value)[0]


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return on each rank the values of all ranks, or of a group, in rank order. Collective.

    The values must be picklable. Without a process group the list has `value` only.
    """
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values

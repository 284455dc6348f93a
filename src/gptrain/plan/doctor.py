"""Checks for common faults of machines with several devices. Each fault is printed with a fix."""

import os
import shutil
import socket
from collections.abc import Iterator

from gptrain.runtime.process import count_cores

# Environment variables that make training slow, and the reason.
SLOW = {
    "NCCL_P2P_DISABLE=1": "GPUs communicate through the memory of the CPU",
    "NCCL_SHM_DISABLE=1": "GPUs without a direct link communicate over the network",
    "NCCL_IB_DISABLE=1": "nodes communicate over TCP, not InfiniBand",
    "NCCL_DEBUG=TRACE": "NCCL writes a line for each call",
    "CUDA_LAUNCH_BLOCKING=1": "the CPU waits for every kernel",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "a second collective checks every collective",
}


def doctor(n_local: int | None, accelerator: str) -> Iterator[str]:
    """Check this machine for faults that would stop a run or make it slow. Nothing is changed.

    Yields one line for each fault, with its fix, and a last line that lists what was checked.

    Args:
        n_local: Number of ranks on this machine. None for one per visible GPU, or one on a CPU.
        accelerator: Value of `trainer.accelerator`. "auto" means GPUs if torch sees any.
    """
    from torch.cuda import device_count  # imported late: a plan needs no torch

    n_gpus = device_count()
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and n_gpus > 0)
    n_local = n_local or (max(1, n_gpus) if on_gpu else 1)
    if on_gpu and n_local > n_gpus:
        message = f"trainer.devices={n_local}, but torch sees {n_gpus} GPUs"
        yield f"warning: {message}; try: CUDA_VISIBLE_DEVICES, or trainer.devices={n_gpus}"
    for word, cost in SLOW.items():
        name, _, value = word.partition("=")
        if os.environ.get(name, "").upper() == value:
            yield f"warning: {word}: {cost}; try: unset {name}"
    n_cores, threads = count_cores(), os.environ.get("OMP_NUM_THREADS", "")
    used = int(threads) * n_local if threads.isdigit() else n_cores
    if used > max(n_cores, n_local) or (used < n_cores and not on_gpu):
        message = f"OMP_NUM_THREADS={threads} x {n_local} ranks on {n_cores} cores"
        yield f"warning: {message}; try: OMP_NUM_THREADS={max(1, n_cores // n_local)}, or unset it"
    # NCCL and data loaders need more than the 64 MiB of docker's default.
    if os.path.exists("/dev/shm") and shutil.disk_usage("/dev/shm").total < 2**30:
        yield "warning: /dev/shm has less than 1 GiB; try: docker run --shm-size=16g"
    port = os.environ.get("MASTER_PORT", "29500")  # default of torchrun
    try:
        socket.create_server(("", int(port))).close()
    except (OSError, ValueError, OverflowError):
        yield f"warning: MASTER_PORT={port} is in use, or is not a port; try: MASTER_PORT=<another>"
    yield f"checked: {n_gpus} GPUs, port, /dev/shm, variables, threads"

"""Checks for common faults of machines with several devices. Each fault is printed with a fix."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from gptrain.runtime.process import count_cores

SHM = Path("/dev/shm")
LEAST_SHM_BYTES = 2**30  # NCCL and data loaders need more than the 64 MiB of docker's default
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

    Yields a line with a fix for each fault, and a last line that lists what was checked.

    Args:
        n_local: Number of ranks on this machine. None for one per visible GPU, or one on a CPU.
        accelerator: Value of `trainer.accelerator`.
    """
    known = nvidia_smi("--query-gpu=index", "--format=csv,noheader").split()
    # CUDA ignores the first invalid index in CUDA_VISIBLE_DEVICES and everything after it.
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(known)).split(",")
    visible = [*takewhile(lambda word: word in known or word.startswith(("GPU-", "MIG-")), shown)]
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and len(visible) > 0)
    n_local = n_local or (max(1, len(visible)) if on_gpu else 1)
    if on_gpu and n_local > len(visible):
        message = f"trainer.devices={n_local}, but {len(visible)} of {len(known)} GPUs are visible"
        yield f"warning: {message}; try: CUDA_VISIBLE_DEVICES, or trainer.devices={len(visible)}"
    for word, cost in SLOW.items():
        name, _, value = word.partition("=")
        if os.environ.get(name, "").upper() == value:
            yield f"warning: {word}: {cost}; try: unset {name}"
    n_cores, threads = count_cores(), os.environ.get("OMP_NUM_THREADS", "")
    used = int(threads) * n_local if threads.isdigit() else n_cores
    if used > max(n_cores, n_local) or (used < n_cores and not on_gpu):
        message = f"OMP_NUM_THREADS={threads} x {n_local} ranks on {n_cores} cores"
        yield f"warning: {message}; try: OMP_NUM_THREADS={max(1, n_cores // n_local)}, or unset it"
    if SHM.exists() and (n_bytes := shutil.disk_usage(SHM).total) < LEAST_SHM_BYTES:
        message = f"/dev/shm has {n_bytes / 2**20:.0f} MiB: workers and NCCL need more"
        yield f"warning: {message}; try: docker run --shm-size=16g"
    port = os.environ.get("MASTER_PORT", "29500")  # default of torchrun
    try:
        socket.create_server(("", int(port))).close()
    except (OSError, ValueError, OverflowError):
        yield f"warning: MASTER_PORT={port} is in use, or is not a port; try: MASTER_PORT=<another>"
    yield f"checked: {len(known)} GPUs, port, /dev/shm, variables, threads"


def nvidia_smi(*arguments: str) -> str:
    """Run nvidia-smi and return its output, or "" if it is missing, fails or takes 20 seconds."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            ["nvidia-smi", *arguments], text=True, timeout=20, stderr=subprocess.DEVNULL
        )
    return ""

"""Checks for common faults of machines with several devices. Each fault is printed with a fix."""

import math
import os
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

from gptrain.costs.machine import count_cores
from gptrain.costs.topology import nvidia_smi

# Limits that slow a GPU down: nvidia-smi's fields of the current and the default value, the unit,
# and the options of nvidia-smi that restore the default.
CAPS = {
    "power": ("power.limit", "power.default_limit", "W", "-pl {usual:.0f}"),
    "clock": ("clocks.applications.graphics", "clocks.default_applications.graphics", "MHz",
              "-rac"),
}  # fmt: skip
FIELDS = ["index", "name", "driver_version", "mig.mode.current"]
FIELDS += [field for now, usual, *_ in CAPS.values() for field in (now, usual)]
DRIVER, SHM = Path("/proc/driver/nvidia/version"), Path("/dev/shm")
NEWEST_TORCH = (2, 15)  # newest version with which the tests ran
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
Faults = Iterator[tuple[str, str]]  # description and fix of each fault


def doctor(n_local: int | None, n_nodes: int, accelerator: str, backend: str | None) -> list[str]:
    """Check this machine for faults that would stop a run or make it slow.

    Nothing is changed. Without nvidia-smi the machine counts as one without GPUs.

    Args:
        n_local: Number of devices per node that the run asks for. None for all devices.
        n_nodes: Number of nodes of the run.
        accelerator: Value of `trainer.accelerator`.
        backend: Value of `strategy.backend`.

    Returns:
        A line with a fix for each fault, and a last line that lists what was checked.
    """
    rows = nvidia_smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    gpus = [dict(zip(FIELDS, row.split(", "), strict=False)) for row in rows.splitlines()]
    n_visible = count_visible([gpu["index"] for gpu in gpus])
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and n_visible > 0)
    if not n_local:
        n_local = max(1, n_visible) if on_gpu else 1
    faults = [*check_gpus(gpus, n_local), *check_variables(n_local, on_gpu), *check_host(n_nodes)]
    if tuple(map(int, version("torch").split(".")[:2])) > NEWEST_TORCH:
        message = f"torch {version('torch')} is newer than any that this library was tested with"
        faults.append((message, "the tests: python -m pytest"))
    if on_gpu and n_local > n_visible:
        message = f"trainer.devices={n_local}, but {n_visible} of {len(gpus)} GPUs are visible"
        faults.append((message, f"CUDA_VISIBLE_DEVICES, or trainer.devices={n_visible}"))
    expected_backend = "nccl" if on_gpu else "gloo"
    if backend not in (None, expected_backend):
        message = f"strategy.backend={backend} on {accelerator}"
        faults.append((message, f"strategy.backend={expected_backend}"))
    seen = f"{len(gpus)} GPUs, driver, clocks, power caps" if gpus else "no GPU seen"
    checked = f"checked: {seen}, backend, port, /dev/shm, variables, threads, host name"
    return [*(f"warning: {message}; try: {fix}" for message, fix in faults), checked]


def count_visible(known: list[str]) -> int:
    """Return the number of GPUs that CUDA shows to a process.

    CUDA ignores the first invalid index in CUDA_VISIBLE_DEVICES and everything after it.

    Args:
        known: Indices of the GPUs of the machine.
    """

    def exists(word: str) -> bool:
        return word.strip() in known or word.startswith(("GPU-", "MIG-"))

    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(known)).split(",")
    return len([*takewhile(exists, shown)])


def check_gpus(gpus: list[dict[str, str]], n_local: int) -> Faults:
    """Yield faults of GPUs: mixed models or drivers, MIG mode, and limits of power and clocks.

    MIG mode is a fault only if the run has several devices on this node. A loaded driver without
    any GPU in `gpus` is a fault, too.

    Args:
        gpus: For each GPU, the values of nvidia-smi's fields in FIELDS, as text.
        n_local: Number of devices of the run on this node.
    """
    for what, field in ("GPUs", "name"), ("drivers", "driver_version"):
        if len(kinds := sorted({gpu[field] for gpu in gpus})) > 1:
            yield f"mixed {what}: {', '.join(kinds)}", "CUDA_VISIBLE_DEVICES=<those of one kind>"
    if DRIVER.exists() and not gpus:
        yield "a driver is loaded, but nvidia-smi fails: their versions may differ", "a reboot"
    if n_local > 1 and any(gpu["mig.mode.current"] == "Enabled" for gpu in gpus):
        yield "MIG is on: slices have no direct link to each other", "nvidia-smi -mig 0"
    for gpu in gpus:
        for what, (now, usual, unit, reset) in CAPS.items():
            now, usual = (float(n) if n[:1].isdigit() else math.nan for n in (gpu[now], gpu[usual]))
            if now < usual:
                fix = f"nvidia-smi -i {gpu['index']} {reset.format(usual=usual)}"
                yield f"GPU {gpu['index']}: {what} capped at {now:.0f} {unit} of {usual:.0f}", fix


def check_variables(n_local: int, on_gpu: bool) -> Faults:
    """Yield faults of the environment variables of this process.

    The faults are: a setting that makes communication or kernels slow (`SLOW`), a network interface
    for NCCL or gloo that does not exist, and an OMP_NUM_THREADS that uses more threads than there
    are cores or, on CPUs, fewer.

    Args:
        n_local: Number of ranks on this node.
        on_gpu: Whether the ranks compute on GPUs.
    """
    for word, cost in SLOW.items():
        name, _, value = word.partition("=")
        if os.environ.get(name, "").upper() == value:
            yield f"{word}: {cost}", f"unset {name}"
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = tuple(os.environ.get(name, "").lstrip("=").split(","))
        if not (wanted[0].startswith("^") or any(i.startswith(wanted) for i in interfaces)):
            yield f"{name}={os.environ[name]}: no such interface", f"{name}={interfaces[-1]}"
    n_cores, threads = count_cores(), os.environ.get("OMP_NUM_THREADS", "")
    used = int(threads) * n_local if threads.isdigit() else n_cores
    if used > max(n_cores, n_local) or (used < n_cores and not on_gpu):
        message = f"OMP_NUM_THREADS={threads} x {n_local} ranks on {n_cores} cores"
        yield message, f"OMP_NUM_THREADS={max(1, n_cores // n_local)}, or unset it"


def check_host(n_nodes: int) -> Faults:
    """Yield faults of the host: a small /dev/shm, a port in use, a name without a usable address.

    Args:
        n_nodes: Number of nodes of the run.
    """
    if SHM.exists() and (n_bytes := shutil.disk_usage(SHM).total) < LEAST_SHM_BYTES:
        message = f"/dev/shm has {n_bytes / 2**20:.0f} MiB: workers and NCCL need more"
        yield message, "docker run --shm-size=16g"
    port = os.environ.get("MASTER_PORT", "29500")  # default of torchrun
    try:
        socket.create_server(("", int(port))).close()
    except (OSError, ValueError, OverflowError):
        yield f"MASTER_PORT={port} is in use, or is not a port", "MASTER_PORT=<another>"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        yield "the host's own name has no address", "a line for it in /etc/hosts"
        return
    if n_nodes > 1 and address.startswith("127."):
        message = f"the host's own name is {address}: other nodes cannot reach it"
        yield message, "its outer address in /etc/hosts, or GLOO_SOCKET_IFNAME"

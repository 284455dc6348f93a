"""What commonly goes wrong with several devices on a machine, each with its fix."""

from __future__ import annotations

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

CAPS = {  # two fields of nvidia-smi, now and usual; unit; what resets it
    "power": ("power.limit", "power.default_limit", "W", "-pl {usual:.0f}"),
    "clock": ("clocks.applications.graphics", "clocks.default_applications.graphics", "MHz",
              "-rac"),
}  # fmt: skip
FIELDS = ["index", "name", "driver_version", "mig.mode.current"]
FIELDS += [field for now, usual, *_ in CAPS.values() for field in (now, usual)]
DRIVER, SHM = Path("/proc/driver/nvidia/version"), Path("/dev/shm")
NEWEST_TORCH = (2, 15)  # with which the suite ran
LEAST_SHM_BYTES = 2**30  # docker gives 64 MiB unless told; NCCL and loaders map more
SLOW = {  # with these values
    "NCCL_P2P_DISABLE=1": "GPUs talk through the memory of the CPU",
    "NCCL_SHM_DISABLE=1": "GPUs without a direct way talk over the network",
    "NCCL_IB_DISABLE=1": "nodes talk over TCP, not InfiniBand",
    "NCCL_DEBUG=TRACE": "NCCL writes a line for each call",
    "CUDA_LAUNCH_BLOCKING=1": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "every collective is checked by another",
}
Found = Iterator[tuple[str, str]]  # what is wrong, and what to do about it


def doctor(n_local: int | None, n_nodes: int, accelerator: str, backend: str | None) -> list[str]:
    """A line for each finding on this machine, and one for what was checked.

    Args:
        n_local: devices of a node that are asked for; None for all there are.
        accelerator, backend: as the config names them.
    """
    rows = nvidia_smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    gpus = [dict(zip(FIELDS, row.split(", "), strict=False)) for row in rows.splitlines()]
    n_visible = count_visible([gpu["index"] for gpu in gpus])
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and n_visible > 0)
    n_local = n_local or (on_gpu and n_visible) or 1
    found = [*check_gpus(gpus, n_local), *check_variables(n_local, on_gpu), *check_host(n_nodes)]
    if tuple(map(int, version("torch").split(".")[:2])) > NEWEST_TORCH:
        message = f"torch {version('torch')} is newer than any that this library was tested with"
        found.append((message, "the tests: python -m pytest"))
    if on_gpu and n_local > n_visible:
        message = f"trainer.devices={n_local}, but {n_visible} of {len(gpus)} GPUs are visible"
        found.append((message, f"CUDA_VISIBLE_DEVICES, or trainer.devices={n_visible}"))
    if backend not in (None, fitting := "nccl" if on_gpu else "gloo"):
        message = f"strategy.backend={backend} on {accelerator}"
        found.append((message, f"strategy.backend={fitting}"))
    seen = f"{len(gpus)} GPUs, driver, clocks, power caps" if gpus else "no GPU seen"
    checked = f"checked: {seen}, backend, port, /dev/shm, variables, threads, host name"
    return [*(f"warning: {message}; try: {fix}" for message, fix in found), checked]


def count_visible(known: list[str]) -> int:
    """GPUs that CUDA shows: of the list it is given those before the first that is not there."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(known)).split(",")
    is_there = lambda one: one.strip() in known or one.startswith(("GPU-", "MIG-"))  # noqa: E731
    return len([*takewhile(is_there, shown)])


def check_gpus(gpus: list[dict[str, str]], n_local: int) -> Found:
    """Of nvidia-smi's rows."""
    for what, field in ("GPUs", "name"), ("drivers", "driver_version"):
        if len(kinds := sorted({gpu[field] for gpu in gpus})) > 1:
            yield f"mixed {what}: {', '.join(kinds)}", "CUDA_VISIBLE_DEVICES=<those of one kind>"
    if DRIVER.exists() and not gpus:
        yield "a driver is loaded, but nvidia-smi fails: not of its version", "a reboot"
    if n_local > 1 and any(gpu["mig.mode.current"] == "Enabled" for gpu in gpus):
        yield "MIG is on: slices have no direct way to each other", "nvidia-smi -mig 0"
    for gpu in gpus:
        for what, (now, usual, unit, reset) in CAPS.items():
            now, usual = (float(n) if n[:1].isdigit() else math.nan for n in (gpu[now], gpu[usual]))
            if now < usual:
                fix = f"nvidia-smi -i {gpu['index']} {reset.format(usual=usual)}"
                yield f"GPU {gpu['index']}: {what} capped at {now:.0f} {unit} of {usual:.0f}", fix


def check_variables(n_local: int, on_gpu: bool) -> Found:
    """Of the environment."""
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


def check_host(n_nodes: int) -> Found:
    """Of /dev/shm, the port where ranks meet, and the machine's own name."""
    if SHM.exists() and (n_bytes := shutil.disk_usage(SHM).total) < LEAST_SHM_BYTES:
        message = f"/dev/shm has {n_bytes / 2**20:.0f} MiB: workers and NCCL need more"
        yield message, "docker run --shm-size=16g"
    port = os.environ.get("MASTER_PORT", "29500")  # torchrun's own
    try:
        socket.create_server(("", int(port))).close()
    except (OSError, ValueError, OverflowError):
        yield f"MASTER_PORT={port} is in use, or no port", "MASTER_PORT=<another>"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        yield "the host's own name has no address", "a line for it in /etc/hosts"
        return
    if n_nodes > 1 and address.startswith("127."):
        message = f"the host's own name is {address}: other nodes cannot reach it"
        yield message, "its outer address in /etc/hosts, or GLOO_SOCKET_IFNAME"

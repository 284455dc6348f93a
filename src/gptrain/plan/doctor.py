"""What commonly goes wrong with several devices on a machine, each with its fix."""

from __future__ import annotations

import csv
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from gptrain.plan.topology import nvidia_smi

GPU_FIELDS = "index,name,driver_version,mig.mode.current"
CAP_FIELDS = (
    "index,power.limit,power.default_limit,clocks.applications.graphics,clocks.max.graphics"
)
LEAST_SHM_BYTES = 2**30  # docker gives 64 MiB unless told; NCCL and loaders map more
SLOW = {  # with these values
    "NCCL_P2P_DISABLE=1": "GPUs talk through the memory of the CPU",
    "NCCL_SHM_DISABLE=1": "GPUs without a direct way talk over the network",
    "NCCL_IB_DISABLE=1": "nodes talk over TCP, not InfiniBand",
    "NCCL_DEBUG=TRACE": "NCCL writes a line for each call",
    "CUDA_LAUNCH_BLOCKING=1": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "every collective is checked by another",
}


@dataclass(frozen=True)
class Facts:
    """What a machine says of itself; gpus and caps are rows of nvidia-smi."""

    environment: Mapping[str, str]
    n_cores: int
    gpus: list[dict[str, str]]
    caps: list[dict[str, str]]
    has_driver: bool
    shm_bytes: int
    interfaces: list[str]
    address: str | None  # of the machine's own name
    busy_port: str | None  # where ranks would meet


def doctor(n_local: int | None, n_nodes: int, accelerator: str, backend: str | None) -> list[str]:
    """A line for each finding on this machine, and one for what was checked.

    Args:
        n_local: devices of a node that are asked for; None for all there are.
        accelerator, backend: as the config names them.
    """
    facts = read_facts()
    found = find_problems(facts, n_local, n_nodes, accelerator, backend)
    seen = f"{len(facts.gpus)} GPUs, driver, clocks, power caps" if facts.gpus else "no GPU seen"
    checked = f"checked: {seen}, backend, port, /dev/shm, variables, threads, host name"
    return [*(f"warning: {wrong}; try: {fix}" for wrong, fix in found), checked]


def find_problems(
    facts: Facts, n_local: int | None, n_nodes: int, accelerator: str, backend: str | None
) -> Iterator[tuple[str, str]]:
    """What is wrong, and what to do about it."""
    gpus, env, cores = facts.gpus, facts.environment, facts.n_cores
    known = [gpu["index"] for gpu in gpus]
    shown = env.get("CUDA_VISIBLE_DEVICES", ",".join(known)).split(",")
    is_there = lambda one: one.strip() in known or one.startswith(("GPU-", "MIG-"))  # noqa: E731
    n_visible = len([*takewhile(is_there, shown)])  # CUDA stops at the first that is not
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and n_visible > 0)
    n_local = n_local or max(1, n_visible if on_gpu else 1)
    for what, key in ("GPUs", "name"), ("drivers", "driver_version"):
        if len(kinds := sorted({gpu[key] for gpu in gpus})) > 1:
            yield f"mixed {what}: {', '.join(kinds)}", "CUDA_VISIBLE_DEVICES=<those of one kind>"
    if facts.has_driver and not gpus:
        yield "a driver is loaded, but nvidia-smi fails: not of its version", "a reboot"
    if n_local > 1 and any(gpu["mig.mode.current"] == "Enabled" for gpu in gpus):
        yield "MIG is on: slices have no direct way to each other", "nvidia-smi -mig 0"
    if on_gpu and n_local > n_visible:
        wrong = f"trainer.devices={n_local}, but {n_visible} of {len(gpus)} GPUs are visible"
        yield wrong, f"CUDA_VISIBLE_DEVICES, or trainer.devices={n_visible}"
    if backend not in (None, fitting := "nccl" if on_gpu else "gloo"):
        yield f"strategy.backend={backend} on {accelerator}", f"strategy.backend={fitting}"
    if facts.busy_port:
        yield f"MASTER_PORT={facts.busy_port} is in use", "MASTER_PORT=<another>"
    if facts.shm_bytes < LEAST_SHM_BYTES:
        size = f"{facts.shm_bytes / 2**20:.0f} MiB"
        yield f"/dev/shm has {size}: workers and NCCL need more", "docker run --shm-size=16g"
    for word, cost in SLOW.items():
        name, _, value = word.partition("=")
        if env.get(name, "").upper() == value:
            yield f"{word}: {cost}", f"unset {name}"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = tuple(env.get(name, "").lstrip("=").split(","))
        if not (wanted[0].startswith("^") or any(i.startswith(wanted) for i in facts.interfaces)):
            yield f"{name}={env[name]}: no such interface", f"{name}={facts.interfaces[-1]}"
    threads = env.get("OMP_NUM_THREADS", "")
    used = int(threads) * n_local if threads.isdigit() else cores
    if used > max(cores, n_local) or (used < cores and not on_gpu):
        wrong = f"OMP_NUM_THREADS={threads} x {n_local} ranks on {cores} cores"
        yield wrong, f"OMP_NUM_THREADS={max(1, cores // n_local)}, or unset it"
    if facts.address is None:
        yield "the host's own name has no address", "a line for it in /etc/hosts"
    elif n_nodes > 1 and facts.address.startswith("127."):
        wrong = f"the host's own name is {facts.address}: other nodes cannot reach it"
        yield wrong, "its outer address in /etc/hosts, or GLOO_SOCKET_IFNAME"
    for cap in facts.caps:
        told = [float(one.split()[0]) if one[:1].isdigit() else math.nan for one in cap.values()]
        for what, unit, now, usual, flag in (
            ("power", "W", *told[1:3], f"-pl {told[2]:.0f}"),
            ("clock", "MHz", *told[3:5], "-rac"),
        ):
            if now < usual:
                fix = f"nvidia-smi -i {cap['index']} {flag}"
                yield f"GPU {cap['index']}: {what} capped at {now:.0f} {unit} of {usual:.0f}", fix


def read_facts() -> Facts:
    """This machine's, by the standard library and nvidia-smi."""
    port, address = os.environ.get("MASTER_PORT", "29500"), None  # torchrun's own
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    with suppress(OSError, ValueError, OverflowError):
        socket.create_server(("", int(port))).close()
        port = None
    has_affinity, shm = hasattr(os, "sched_getaffinity"), Path("/dev/shm")
    return Facts(
        os.environ,
        len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        *(
            parse_csv(nvidia_smi(f"--query-gpu={f}", "--format=csv"))
            for f in (GPU_FIELDS, CAP_FIELDS)
        ),
        has_driver=Path("/proc/driver/nvidia/version").exists(),
        shm_bytes=os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize if shm.exists() else 2**40,
        interfaces=[name for _, name in socket.if_nameindex()],
        address=address,
        busy_port=port,
    )


def parse_csv(text: str) -> list[dict[str, str]]:
    """A dict without units for each GPU of `nvidia-smi --query-gpu=... --format=csv`."""
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    return [{key.split(" [")[0]: value for key, value in row.items()} for row in rows]

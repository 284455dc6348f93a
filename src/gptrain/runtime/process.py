"""Which process this is, started by a person or a rank that a launcher started; where ranks meet.

Standard library only: read before torch is imported, and by Hydra's resolvers.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Launcher -> its variables of this process: rank, ranks, local rank, ranks on this node.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # accelerate launch, too
    "openmpi": tuple(f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel's, too
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
PORTS = range(20000, 30000)  # below those that Linux gives to clients
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
ATTEMPTS_NAME = ".beats"  # in the run folder, a folder for each start
_START_S = time.time()  # of this process, nearly
_reservations: list[ExitStack] = []  # names of GPUs that are this process's


@dataclass(frozen=True)
class Process:
    """Place of this process in its job.

    Attributes:
        launcher: "none" (by a person), "gptrain" (by our supervisor), or one of LAUNCHERS.
        rank, local_rank, world_size, n_nodes: as the launcher set them; 0, 0, 1, 1 without one.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    n_nodes: int = 1

    @property
    def is_rank(self) -> bool:
        """True where a launcher started this process as one rank of a job."""
        return self.launcher != "none"


def this_process() -> Process:
    """Reads the launcher's environment.

    A shell inside a SLURM allocation is not a rank: only a step of several tasks (srun) makes
    ranks (pytorch-lightning#20391). What mpirun starts on SLURM's nodes is a task of srun's, too,
    one on each node: then MPI's numbers count.

    Raises:
        ValueError: Where variables are no numbers, or numbers that contradict each other.
        KeyError: Where a launcher has set some of its variables, but not all.
    """
    env = os.environ
    for launcher, (rank, ranks, local_rank, local_ranks) in LAUNCHERS.items():
        world_size = int(env.get(ranks, 0))
        is_set = rank in env and world_size > (0 if launcher == "torchrun" else 1)
        is_srun = launcher == "mpich" and local_rank not in env and "SLURM_LOCALID" in env
        if not is_set or is_srun:  # srun --mpi=pmi2 sets two of them
            continue
        n_nodes = max(1, world_size // max(1, int(env.get(local_ranks, world_size))))
        if launcher == "slurm":
            n_nodes = int(env.get("SLURM_STEP_NUM_NODES", 1))
        number = env.get(local_rank, env[rank]) if launcher == "torchrun" else env[local_rank]
        if env.get("GPTRAIN_SUPERVISED"):
            launcher = "gptrain"
        if not 0 <= int(env[rank]) < world_size:
            raise ValueError(f"{rank}={env[rank]} is no rank of {ranks}={world_size}")
        return Process(launcher, int(env[rank]), int(number), world_size, n_nodes)
    return Process("none", 0, 0, 1)


def rank_variables() -> tuple[str, ...]:
    """Return the names of the variables that say which rank this is, and of how many."""
    launcher = this_process().launcher.replace("gptrain", "torchrun")  # whose names it sets
    return LAUNCHERS.get(launcher, ())[:2]


def listed_numbers(devices: object) -> tuple[int, ...]:
    """(1, 3) of trainer.devices=[1,3] or "1,3", (3,) of "3,"; empty where nothing is listed."""
    if isinstance(devices, str):
        devices = [part for part in devices.split(",") if part.strip()] if "," in devices else ()
    return tuple(map(int, devices)) if isinstance(devices, Sequence) else ()


def count_devices(devices: Any) -> int | None:
    """Ranks on one node that trainer.devices asks for; None where the machine decides."""
    if numbers := listed_numbers(devices):
        return len(numbers)
    return None if devices in (None, "auto", -1, "-1") else int(devices)


def count_nodes(num_nodes: int | str) -> int:
    """Nodes of the job that trainer.num_nodes asks for; auto: as many as the launcher started."""
    return this_process().n_nodes if num_nodes == "auto" else int(num_nodes)


def stop_idle_spinning() -> None:
    """Keeps idle OpenMP threads from spinning; call it before torch is imported.

    Beside a busy process two that spin for each other made a run three times slower than one; after
    1,000 turns they sleep (gpt_nano, two cores, torch 2.13). What the user has set is obeyed.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "1000"


def run_stamp() -> str:
    """Name of this run's folder: a time that all ranks of the job agree on.

    Ranks of a node start in different seconds, so they take the start of their launcher, which
    also stays over torchrun's restarts; SLURM's job number stays over a requeue.
    """
    env = os.environ
    process = this_process()
    if process.launcher == "slurm":
        array, step = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), env.get("SLURM_STEP_ID", "0")
        job = "_".join(env[name] for name in array if name in env) or env["SLURM_JOB_ID"]
        return f"slurm-{job}" + (f".{step}" if step != "0" else "")  # srun is typed by hand
    started_s = launcher_start() if process.launcher in LAUNCHERS else _START_S
    second = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(started_s))
    return f"{second}-{int(started_s * 1000) % 1000:03d}"


def launcher_start() -> float:
    """Start of the launcher's process on this node, in seconds since the epoch.

    That is the nearest ancestor which is no rank itself: `mpirun bash each.sh` has a shell between.
    Where there is no /proc, the start of this process.
    """
    pid, variable = os.getppid(), f"\0{LAUNCHERS[this_process().launcher][0]}=".encode()
    try:
        with suppress(PermissionError):  # of another user: no rank of ours
            while variable in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                pid = int(_stat_fields(pid)[1])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
        ticks = int(_stat_fields(pid)[19])
    except OSError:
        return _START_S
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str]:
    """Fields 3 (state), 4 (parent) and on of proc(5), after the name, which may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def store_path(run_dir: str | Path) -> str | None:
    """The file at which ranks of one node meet; None where they meet at MASTER_ADDR, or nowhere.

    torchrun's own store listens on all interfaces, and over its restarts the ranks find keys of
    the attempt before in it and wait for ranks that are gone (pytorch#135712); on several nodes set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. An address that a job script of SLURM sets is obeyed.
    """
    process = this_process()
    is_given = process.launcher == "slurm" and "MASTER_ADDR" in os.environ
    meets_here = process.is_rank and process.n_nodes == 1 and not is_given
    return str(attempt_folder(run_dir) / "store") if meets_here else None


def set_rendezvous(run_dir: str | Path) -> None:
    """Says in the environment where ranks of several nodes meet, and how they reach that.

    srun names the nodes, but no address and no port.
    """
    env, process = os.environ, this_process()
    if not process.is_rank or store_path(run_dir):
        return
    if process.launcher == "slurm":
        env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
        number = int(env["SLURM_JOB_ID"]) + 997 * int(env.get("SLURM_STEP_ID", 0))  # a prime
        env.setdefault("MASTER_PORT", str(PORTS[number % len(PORTS)]))
    if name := interface_towards(env.get("MASTER_ADDR", "localhost")):
        env.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_towards(host: str) -> str | None:
    """The network interface by which this node's routes reach host; None where that is not known.

    gloo takes that of the node's own name, which many a hosts file calls 127.0.1.1: the other nodes
    are then refused. Where host is such a name of this node, it is the default route's.
    """
    with suppress(OSError):
        address = int.from_bytes(socket.inet_aton(socket.gethostbyname(host)), sys.byteorder)
        _, *lines = Path("/proc/net/route").read_text().splitlines()
        routes = [(int(r[7], 16), int(r[1], 16), r[0]) for r in map(str.split, lines)]
        fitting = [route for route in routes if address & route[0] == route[1]] or routes
        return max(fitting, key=lambda route: route[0].bit_count())[2] if fitting else None
    return None


def attempt_folder(run_dir: str | Path) -> Path:
    """Heartbeats of this start's ranks, and where they meet; the next start removes it."""
    return Path(run_dir) / ATTEMPTS_NAME / attempt()


def attempt() -> str:
    """A name of this start of the job: the same in all its ranks, and of no other start.

    Each agent of torchrun counts restarts by itself, those of other nodes not among them; but they
    agree on a port, which is a new one for each start (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).
    """
    env, process = os.environ, this_process()
    if process.launcher == "gptrain":
        return env["TORCHELASTIC_RUN_ID"]
    if process.launcher == "slurm" or process.n_nodes == 1:
        return "-".join([run_stamp(), *(env.get(name, "0") for name in RESTART_COUNTS)])
    job = env.get("TORCHELASTIC_RUN_ID") or env.get("PMIX_NAMESPACE")  # of Open MPI
    return re.sub("[^A-Za-z0-9_-]", "_", f"{job}-{env.get('MASTER_PORT')}")


def reserve_gpus(devices: Any) -> None:
    """Leaves a job of submitit_local so many GPUs, that no other job has, once they are free.

    submitit shows the same `hydra.launcher.gpus_per_node` to all jobs. A name in Linux's abstract
    namespace stands for each GPU, and is free again when the process ends, however that ends.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if os.environ.get("SUBMITIT_EXECUTOR") != "local" or not shown:
        return
    gpus = shown.split(",")
    n = min(count_devices(devices) or len(gpus), len(gpus))
    blocks = [gpus[first : first + n] for first in range(0, len(gpus) - n + 1, n)]
    while (taken := next(filter(_reserve, blocks), None)) is None:
        time.sleep(0.2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)


def _reserve(names: list[str]) -> bool:
    """Whether all of the names were free, and are this process's now."""
    with ExitStack() as sockets, suppress(OSError):
        for name in names:
            sockets.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0gptrain-gpu-{name}")
        _reservations.append(sockets.pop_all())
        return True
    return False


def first_host(nodes: str) -> str:
    """Of a node list as SLURM writes it: `gpu[003-007,9],login1` -> `gpu003`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]

"""Rank and world size of this process, and the numbers of ranks, nodes and cores.

Every launcher's variables are translated into those of torchrun, once, at the start of a command.
This module imports no torch, because it is used before torch is imported, and by Hydra's resolvers.
"""

import os
import re
import zlib
from dataclasses import dataclass
from datetime import datetime

from gptrain.core.errors import ConfigError

PORTS = range(20000, 30000)  # below the ports that Linux assigns to outgoing connections
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The same numbers as other launchers name them. torchrun and `accelerate launch` set TORCHRUN. If
# the variables of several launchers are set, the first of these counts: mpirun starts one task of
# srun on each node. SLURM has no variable with the number of ranks on this node.
OTHERS = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
JOB_NAME = "GPTRAIN_JOB"  # name of the run folder of a job of SLURM
# Number of restarts, in ranks whose parent has expanded `from_run` and checked the config.
CHECKED = "GPTRAIN_CHECKED"
_START = datetime.now()  # approximate start of this process


@dataclass(frozen=True)
class Process:
    """Rank of this process, and size of its job.

    Attributes:
        rank: Global rank. 0 without a launcher.
        local_rank: Rank on this node. 0 without a launcher.
        world_size: Number of ranks of the job. 1 without a launcher.
        n_nodes: Number of nodes of the job.
        is_rank: True if a launcher has started this process as one rank of a job.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    n_nodes: int = 1
    is_rank: bool = False


def adopt_launcher() -> None:
    """Translate the environment variables of srun, mpirun or mpiexec into those of torchrun.

    Nothing changes for a process that torchrun has started, or that is not one of several ranks: a
    shell inside a SLURM allocation is none, only a step of several tasks (srun) starts ranks
    (pytorch-lightning#20391). Under srun `run_stamp` becomes `slurm-<job id>`, and
    OMP_NUM_THREADS, unless it is set, the number of cores of a task. For mpirun on several nodes
    the user sets MASTER_ADDR and MASTER_PORT. Raises as `this_process`.
    """
    env = os.environ
    for names in OTHERS:
        values = [env.get(name) for name in names]
        # `srun --mpi=pmi2` sets two of the variables of MPI.
        if this_process().is_rank or not all(values[:3]) or values[1] == "1":
            continue
        env.update({ours: value for ours, value in zip(TORCHRUN, values) if value})  # noqa: B905
        host, job = "localhost", env.get("PMIX_NAMESPACE") or str(os.getppid())
        if names[0] == "SLURM_PROCID":
            n_nodes, step = int(env["SLURM_STEP_NUM_NODES"]), env.get("SLURM_STEP_ID", "0")
            env["LOCAL_WORLD_SIZE"] = str(int(env["WORLD_SIZE"]) // n_nodes)
            if n_nodes > 1:  # gpu[003-007,9],login1 -> gpu003
                nodes = env["SLURM_STEP_NODELIST"]
                host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
            array = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
            name = "_".join(env[name] for name in array if name in env) or env["SLURM_JOB_ID"]
            # A later srun of the same job is another run.
            env[JOB_NAME] = job = f"slurm-{name}" + (f".{step}" if step != "0" else "")
            if threads := env.get("SLURM_CPUS_PER_TASK"):
                env.setdefault("OMP_NUM_THREADS", threads)
        elif env["WORLD_SIZE"] != env.get("LOCAL_WORLD_SIZE"):
            continue  # the user names the address of the first of several nodes
        env.setdefault("MASTER_ADDR", host)
        env.setdefault("MASTER_PORT", str(PORTS[zlib.crc32(job.encode()) % len(PORTS)]))


def this_process() -> Process:
    """Return the rank of this process and the size of its job, from the variables of torchrun.

    A process is a rank if RANK and WORLD_SIZE are set: some clusters set one of them everywhere. If
    they were set by hand, without LOCAL_RANK, the local rank follows from the rank.

    Raises:
        ConfigError: If a variable is not a number, or the numbers contradict each other.
    """
    if not os.environ.get("RANK") or not os.environ.get("WORLD_SIZE"):
        return Process()
    world_size = _read_number("WORLD_SIZE", below=2**31)
    rank = _read_number("RANK", below=world_size)
    n_local = _read_number("LOCAL_WORLD_SIZE", world_size, below=world_size + 1)
    local_rank = _read_number("LOCAL_RANK", rank % max(n_local, 1), below=n_local)
    return Process(rank, local_rank, world_size, world_size // n_local, is_rank=True)


def _read_number(name: str, default: int = 0, *, below: int) -> int:
    """Return the number in an environment variable. A ConfigError unless it is below `below`."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) >= below:
        raise ConfigError.of(name, text, f"must be a whole number below {below}")
    return int(text)


def is_restart() -> bool:
    """Return whether this job was restarted, by our parent process, torchrun or SLURM."""
    counts = (CHECKED, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(os.environ.get(name, "0") != "0" for name in counts)


def run_stamp() -> str:
    """Return the name of this run's folder, which is the same on all ranks of a job.

    Under srun it is `slurm-<job>`, or `slurm-<array job>_<task>` in an array, followed by `.<step>`
    after the first srun of the job, and the same when the job is requeued. Otherwise it is the time
    at which the first rank that asks has started, such as `2026-01-31_12-00-00-123`: several ranks
    connect to agree on it, so that all must call this function. Raises as `store.job_store`.
    """
    if name := os.environ.get(JOB_NAME):
        return name
    name = _START.strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]  # milliseconds
    if this_process().world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return name
    from gptrain.runtime.store import job_store  # imports torch

    return job_store().compare_set("name of the run folder", "", name).decode()


def count_cores() -> int:
    """Return the number of logical CPUs on which this process may run.

    macOS reports only the number of the machine. A container's quota of CPU time does not count.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_devices(devices: int | str | list[int]) -> int | None:
    """Return the number of ranks per node that trainer.devices asks for.

    "auto" means the launcher's, or None without one, which leaves it to the machine. Of a list of
    device numbers the length counts.
    """
    process = this_process()
    if devices == "auto":
        return process.world_size // process.n_nodes if process.is_rank else None
    return len(devices) if isinstance(devices, list) else int(devices)

"""Rank and world size of this process, and how the ranks of a job find each other.

This module imports only the standard library and `gptrain.core.errors`, because it is used before
torch is imported, and by Hydra's resolvers.
"""

import ctypes
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptrain.core.errors import ConfigError

VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of the CUDA driver
PORTS = range(20000, 30000)  # below the ports that Linux assigns to outgoing connections
ATTEMPTS_NAME = ".beats"  # folder in the run folder; it has a folder for each start
_START_S = time.time()  # approximate start of this process


@dataclass(frozen=True)
class Launcher:
    """Names of the environment variables that a launcher sets for each rank.

    A name is empty if the launcher has no such variable.

    Attributes:
        rank: Variable with the global rank.
        world_size: Variable with the number of ranks of the job.
        local_rank: Variable with the rank on this node.
        local_world_size: Variable with the number of ranks on this node.
        n_nodes: Variable with the number of nodes, read if there is no `local_world_size`.
        restarts: Variable with the number of times that the job was restarted or requeued.
        job: Variable with a name of the job that is equal on all nodes. It is needed for a job on
            several nodes, except under SLURM, whose number of the job is used.
        cores: Variable with the number of cores of each rank.
        is_set_by_hand: True if people and other launchers set these variables, too. A process is
            then a rank even if the world size is 1, and `local_rank` may be missing.
        needs_address: True if on several nodes the user has to set MASTER_ADDR and MASTER_PORT.
    """

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""
    n_nodes: str = ""
    restarts: str = ""
    job: str = ""
    cores: str = ""
    is_set_by_hand: bool = False
    needs_address: bool = False


# Launchers. If the variables of several launchers are set, the first of these counts: SLURM's
# variables are also set in ranks that torchrun or mpirun has started within a job of SLURM.
LAUNCHERS = {
    "torchrun": Launcher(  # also accelerate launch
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", is_set_by_hand=True,
        restarts="TORCHELASTIC_RESTART_COUNT", job="TORCHELASTIC_RUN_ID",
    ),
    "openmpi": Launcher(
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        job="PMIX_NAMESPACE", needs_address=True,
    ),
    "mpich": Launcher(  # also Intel MPI
        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", needs_address=True,
    ),
    "slurm": Launcher(
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", n_nodes="SLURM_STEP_NUM_NODES",
        restarts="SLURM_RESTART_COUNT", cores="SLURM_CPUS_PER_TASK",
    ),
}  # fmt: skip
RESTART_COUNTS = tuple(row.restarts for row in LAUNCHERS.values() if row.restarts)


@dataclass(frozen=True)
class Process:
    """Rank of this process, and size of its job.

    Attributes:
        launcher: "none" (started by a person), "gptrain" (started by gptrain's supervisor), or a
            key of LAUNCHERS.
        rank: Global rank. 0 without a launcher.
        local_rank: Rank on this node. 0 without a launcher.
        world_size: Number of ranks of the job. 1 without a launcher.
        n_nodes: Number of nodes of the job.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    n_nodes: int = 1

    @property
    def is_rank(self) -> bool:
        """True if a launcher started this process as one rank of a job."""
        return self.launcher != "none"

    @property
    def variables(self) -> Launcher | None:
        """Names of the environment variables of the launcher. None without a launcher.

        gptrain's supervisor sets those of torchrun.
        """
        return LAUNCHERS.get("torchrun" if self.launcher == "gptrain" else self.launcher)


def this_process() -> Process:
    """Return the rank of this process and the size of its job, as its launcher has set them.

    They are read from environment variables. Without a launcher the result is Process("none", 0, 0,
    1). A shell inside a SLURM allocation has no launcher either: only a step of several tasks
    (srun) starts ranks (pytorch-lightning#20391). Under mpirun on SLURM's nodes the variables of
    both are set, because mpirun starts one srun task on each node. Then the variables of MPI are
    used. If RANK and WORLD_SIZE were set by hand, without LOCAL_RANK, the local rank is the rank.

    Raises:
        ConfigError: If a variable is not a number, if the numbers contradict each other, or if a
            launcher other than torchrun has not set the local rank.
    """
    for launcher, names in LAUNCHERS.items():
        rank, local_rank = read_number(names.rank), read_number(names.local_rank)
        world_size = read_number(names.world_size, least=1)
        n_local = read_number(names.local_world_size, least=1)
        is_srun = launcher == "mpich" and local_rank is None and "SLURM_LOCALID" in os.environ
        if rank is None or is_srun:  # `srun --mpi=pmi2` sets two of the MPI variables
            continue
        if world_size in (None, 1) and not names.is_set_by_hand:
            continue
        _check_at_most(names.rank, rank, (world_size or 1) - 1, names.world_size)
        if world_size is None:
            continue
        _check_at_most(names.local_world_size, n_local or 1, world_size, names.world_size)
        limit_name = names.world_size if n_local is None else names.local_world_size
        _check_at_most(names.local_rank, local_rank or 0, (n_local or world_size) - 1, limit_name)
        if local_rank is None:
            if not names.is_set_by_hand:
                raise ConfigError.of(names.local_rank, None, f"not set, but {names.rank}={rank}")
            local_rank = rank
        n_nodes = read_number(names.n_nodes, least=1) or world_size // (n_local or world_size)
        if os.environ.get("GPTRAIN_SUPERVISED"):
            launcher = "gptrain"
        return Process(launcher, rank, local_rank, world_size, n_nodes)
    return Process("none", 0, 0, 1)


def read_number(name: str, least: int = 0) -> int | None:
    """Return the whole number in an environment variable, or None if it is not set or empty.

    Args:
        name: Name of the variable. An empty name stands for a variable that does not exist.
        least: Smallest number that is allowed.

    Raises:
        ConfigError: If the value is not a whole number, or is too small.
    """
    text = os.environ.get(name, "").strip()
    if text and not (text.isdecimal() and int(text) >= least):
        message = f"must be a whole number, at least {least}"
        raise ConfigError.of(name, text, message, hint=f"unset {name}")
    return int(text) if text else None


def _check_at_most(name: str, number: int, most: int, limit_name: str) -> None:
    """Check that the number in an environment variable is at most that which another one allows.

    Args:
        name: Name of the variable.
        number: Number in the variable.
        most: Largest number that is allowed.
        limit_name: Name of the variable from which `most` follows.

    Raises:
        ConfigError: If the number is too large.
    """
    if number > most:
        is_set = limit_name in os.environ
        limit = f"{limit_name}={os.environ[limit_name]}" if is_set else f"{limit_name} is not set"
        message = f"must be at most {most} ({limit})"
        raise ConfigError.of(name, number, message, hint=f"unset {name}")


def rank_variables() -> tuple[str, ...]:
    """Return the names of the environment variables with the rank and the world size, for errors.

    The launcher of this process decides. The result is empty without a launcher.

    Raises:
        ConfigError: If the launcher's variables are wrong (see `this_process`).
    """
    names = this_process().variables
    return (names.rank, names.world_size) if names else ()


def listed_numbers(devices: object) -> tuple[int, ...]:
    """Return the device numbers that trainer.devices lists, or () if it is a count or "auto".

    [1, 3] and "1,3" give (1, 3), and "3," gives (3,).

    Args:
        devices: Value of trainer.devices in any of its forms.

    Raises:
        ValueError: If an entry of a list is not a number.
    """
    if isinstance(devices, str):
        devices = [part for part in devices.split(",") if part.strip()] if "," in devices else ()
    return tuple(map(int, devices)) if isinstance(devices, Sequence) else ()


def count_cores() -> int:
    """Return the number of logical CPUs on which this process may run.

    macOS and Windows report only the number of the machine. A container's quota of CPU time does
    not count.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_devices(devices: Any) -> int | None:
    """Return the number of ranks per node that trainer.devices asks for.

    Args:
        devices: Value of trainer.devices: an integer, a text such as "2", "1,3", "auto" or "-1", or
            a list of device numbers, of which the length counts.

    Returns:
        The number, or None for "auto" and -1, which leave it to the launcher or the machine.

    Raises:
        ValueError: If a text is none of these.
    """
    numbers = listed_numbers(devices)
    if numbers:
        return len(numbers)
    return None if devices in (None, "auto", -1, "-1") else int(devices)


def count_nodes(num_nodes: int | str) -> int:
    """Return the number of nodes that trainer.num_nodes asks for.

    Args:
        num_nodes: Value of the key. "auto" stands for the nodes on which the launcher has started
            ranks, 1 without a launcher.

    Raises:
        ConfigError: If it is "auto" and the launcher's variables are wrong (see `this_process`).
    """
    return this_process().n_nodes if num_nodes == "auto" else int(num_nodes)


def stop_idle_spinning() -> None:
    """Let idle OpenMP threads sleep after 1,000 turns of waiting, by the variable GOMP_SPINCOUNT.

    Call it before torch is imported.

    On a machine with another busy process, two threads that wait for each other actively made a run
    three times slower than one thread (gpt_nano, two cores, torch 2.13). Does nothing if the user
    has set GOMP_SPINCOUNT or OMP_WAIT_POLICY.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "1000"


def expand_gpu_segments() -> None:
    """Let torch's CUDA allocator grow its segments of memory, so that less memory stays unused.

    Sets PYTORCH_ALLOC_CONF; call it before torch is imported. Does nothing if the user has set the
    allocator's options, or if the GPU driver has no virtual memory management. Without a driver the
    variable is set and has no effect.
    """
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        return
    with suppress(OSError):  # without a driver the option has no effect
        driver = ctypes.CDLL("libcuda.so.1")
        is_supported = ctypes.c_int(0)
        driver.cuInit(0)
        driver.cuDeviceGetAttribute(ctypes.byref(is_supported), VIRTUAL_MEMORY, 0)
        if not is_supported.value:
            return
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def run_stamp() -> str:
    """Return the name of this run's folder, which is equal on all ranks of a node.

    The name is the time at which the launcher on this node started, such as
    `2026-01-31_12-00-00-123`, because the ranks of a node start in different seconds. It does not
    change when torchrun restarts the ranks. Without a launcher it is the time at which this process
    started. The ranks of gptrain's own supervisor get the composed config, which has this name.

    Under srun the name is `slurm-<job>`, or `slurm-<array job>_<task>` in an array, followed by
    `.<step>` after the first srun of the job. It is equal on all nodes, and does not change when
    the job is requeued. The resolver of `${run_stamp:}` in the default `run_dir` calls this
    function.

    Raises:
        ConfigError: If the launcher's variables are wrong (see `this_process`).
    """
    env = os.environ
    process = this_process()
    if process.launcher == "slurm":
        array = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
        step = env.get("SLURM_STEP_ID", "0")
        job = "_".join(env[name] for name in array if name in env) or env["SLURM_JOB_ID"]
        return f"slurm-{job}" + (f".{step}" if step != "0" else "")  # a later srun of the same job
    started_s = launcher_start() if process.launcher in LAUNCHERS else _START_S
    second = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(started_s))
    return f"{second}-{int(started_s * 1000) % 1000:03d}"


def launcher_start() -> float:
    """Return when the launcher's process on this node was started, in seconds since 1970.

    All ranks of the node get the same time. The launcher is the nearest ancestor process that has
    no rank in its environment: `mpirun bash script.sh` has a shell in between, which has one.
    Without /proc the result is the start of this process. Call it in a rank that a launcher has
    started.
    """
    pid = os.getppid()
    variable = f"\0{LAUNCHERS[this_process().launcher].rank}=".encode()
    try:
        with suppress(PermissionError):  # a process of another user is not a rank of this job
            while variable in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                pid = int(_stat_fields(pid)[1])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
        ticks = int(_stat_fields(pid)[19])
    except OSError:
        return _START_S
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from field 3 (state) on, as in proc(5).

    Field 2, the name of the process, may contain spaces and is skipped.

    Args:
        pid: Process number.

    Raises:
        OSError: If there is no such process, or no /proc.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def store_path(run_dir: str | Path) -> str | None:
    """Return the file through which the ranks of one node find each other (torch's FileStore).

    A file is used instead of torchrun's TCP store. That store listens on all interfaces, and after
    a restart it still has keys of the previous start, so that ranks wait for processes that are
    gone (pytorch#135712). On several nodes, where no file is used, the user sets
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for this reason.

    Args:
        run_dir: Run folder.

    Returns:
        The path, or None if this process is not a rank, the job has several nodes, or a SLURM job
        script has set MASTER_ADDR.

    Raises:
        ConfigError: If the launcher's variables are wrong (see `this_process`).
    """
    process = this_process()
    has_address = process.launcher == "slurm" and "MASTER_ADDR" in os.environ
    uses_file = process.is_rank and process.n_nodes == 1 and not has_address
    return str(attempt_folder(run_dir) / "store") if uses_file else None


def set_rendezvous(run_dir: str | Path) -> None:
    """Set the environment variables by which the ranks of several nodes find each other.

    GLOO_SOCKET_IFNAME is set under every launcher, if the network interface is found. MASTER_ADDR
    (the first node) and MASTER_PORT (derived from the number of the job) are set under srun, which
    provides neither. A variable that the user has set stays as it is. Does nothing if this process
    is not a rank, or if the ranks use a file (`store_path`).

    Args:
        run_dir: Run folder, the argument of `store_path`.

    Raises:
        ConfigError: If the launcher's variables are wrong (see `this_process`).
    """
    env = os.environ
    process = this_process()
    if not process.is_rank or store_path(run_dir):
        return
    if process.launcher == "slurm":
        env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
        number = int(env["SLURM_JOB_ID"]) + 997 * int(env.get("SLURM_STEP_ID", 0))  # 997 is prime
        env.setdefault("MASTER_PORT", str(PORTS[number % len(PORTS)]))
    name = interface_towards(env.get("MASTER_ADDR", "localhost"))
    if name:
        env.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_towards(host: str) -> str | None:
    """Return the network interface over which this node reaches a host, or None if it is unknown.

    gloo would use the interface of the node's own name. Many hosts files map this name to
    127.0.1.1, where other nodes cannot connect. Of several routes to the host the most specific one
    counts. If no route leads to the host, the most specific one of all routes counts. A loopback
    address of this node gives the interface of the default route. The interface is unknown if the
    host's name is, or if /proc/net/route is missing or lists no route.

    Args:
        host: Name or address of the host, usually MASTER_ADDR.
    """
    with suppress(OSError):
        address = int.from_bytes(socket.inet_aton(socket.gethostbyname(host)), sys.byteorder)
        _, *lines = Path("/proc/net/route").read_text().splitlines()
        routes = [(int(r[7], 16), int(r[1], 16), r[0]) for r in map(str.split, lines)]
        matching = [route for route in routes if address & route[0] == route[1]] or routes
        return max(matching, key=lambda route: route[0].bit_count())[2] if matching else None
    return None


def attempt_folder(run_dir: str | Path) -> Path:
    """Return the folder in the run folder for the heartbeats and the rendezvous file of this start.

    All ranks get the same folder, and each start of the job gets another one. It may not exist yet.
    The next start removes it.

    Args:
        run_dir: Run folder.

    Raises:
        ConfigError: If the launcher's variables are wrong (see `this_process`).
    """
    return Path(run_dir) / ATTEMPTS_NAME / attempt()


def attempt() -> str:
    """Return a name for this start of the job: equal on all ranks, and different for each start.

    gptrain's supervisor gives each start a random name. Under srun, and on one node, the name is
    `run_stamp()` followed by the restart counts of the launchers. On several nodes it contains
    MASTER_PORT instead, because each agent of torchrun counts its own restarts only. All agents
    agree on the port, and with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 each start has a new port.

    Raises:
        ConfigError: If the launcher's variables are wrong (see `this_process`).
    """
    env = os.environ
    process = this_process()
    if process.launcher == "gptrain":
        return env["TORCHELASTIC_RUN_ID"]
    if process.launcher == "slurm" or process.n_nodes == 1:
        return "-".join([run_stamp(), *(env.get(name, "0") for name in RESTART_COUNTS)])
    job = env.get(LAUNCHERS[process.launcher].job)
    return re.sub("[^A-Za-z0-9_-]", "_", f"{job}-{env.get('MASTER_PORT')}")


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `gpu[003-007,9],login1` gives `gpu003`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]

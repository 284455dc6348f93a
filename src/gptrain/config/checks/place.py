"""Where the run is: the launcher that started this process, and the folder it will write into."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptrain.config.checks.run import Run
from gptrain.config.checks.strategies import count_devices
from gptrain.launch.process import Process, this_process
from gptrain.problems import FOLDER_UNUSABLE

PROCESSES_PER_CORE = 16  # more take longer for their turn than a collective should wait
PSEUDO = ("/proc", "/sys", "/dev")  # hold no files of ours, whatever the permissions say


def check_place(run: Run) -> None:
    """Launcher's environment and run folder; standard library only."""
    try:
        process = this_process()
    except (ValueError, KeyError) as error:
        run.error("", f"the launcher's environment cannot be read: {error}")
        return
    n_local, cores = count_devices(run.get("trainer.devices")), count_cores()
    if n_local and n_local > PROCESSES_PER_CORE * cores:
        run.error(
            "trainer.devices",
            f"too many processes for {cores} cores",
            allowed=f"up to {PROCESSES_PER_CORE * cores}",
            attempt=f"trainer.devices={cores}",
        )
    _check_launcher(run, process)
    if process.rank == 0 and process.launcher != "gptrain":
        _check_folder(run)


def count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_launcher(run: Run, process: Process) -> None:
    n_nodes, given = run.get("trainer.num_nodes"), run.get("trainer.devices")
    if process.launcher == "none":
        if n_nodes and n_nodes > 1:
            run.error(
                "trainer.num_nodes",
                "a single process starts ranks on its own machine only",
                attempt=f"torchrun --nnodes={n_nodes} ... train.py on each node, or srun",
            )
        return
    if process.launcher == "gptrain":
        return
    n_local = count_devices(given)
    if n_local is None and "trainer.devices" not in run.wrong and n_nodes:
        each = os.environ.get("LOCAL_WORLD_SIZE")  # auto: what the launcher started on each
        n_local = int(each or process.world_size // n_nodes)
    if n_local and n_nodes and n_local * n_nodes != process.world_size:
        each = int(os.environ.get("LOCAL_WORLD_SIZE", process.world_size // n_nodes))
        nodes = max(1, process.world_size // max(1, each))
        run.error(
            "trainer.devices",
            f"{n_local} x trainer.num_nodes={n_nodes} = {n_local * n_nodes}, but "
            f"{'WORLD_SIZE' if process.launcher == 'torchrun' else 'SLURM tasks'}"
            f"={process.world_size}",
            attempt=f"trainer.devices={each}"
            + (f" trainer.num_nodes={nodes}" if nodes != n_nodes else ""),
        )
    step_nodes = os.environ.get("SLURM_STEP_NUM_NODES")
    if process.launcher == "slurm" and step_nodes and n_nodes and int(step_nodes) != n_nodes:
        run.error(
            "trainer.num_nodes",
            f"srun started this step on {step_nodes} nodes",
            attempt=f"trainer.num_nodes={step_nodes}",
        )
    if process.launcher == "torchrun" and n_nodes and n_nodes > 1 and "run_dir" in run.derived:
        run.error(
            "run_dir",
            "each node would name its folder by its own clock",
            value=None,
            attempt="run_dir=<a folder that all nodes see>",
        )
    if not 0 <= process.rank < process.world_size:
        run.error("", f"RANK={process.rank} is not below WORLD_SIZE={process.world_size}")
    if process.launcher == "torchrun" and process.world_size > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            run.error(
                "",
                f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}",
                attempt=f"torchrun --nproc_per_node={process.world_size} train.py",
            )
    if process.launcher == "torchrun" and run.get("launcher.max_restarts"):
        run.warn(
            "launcher.max_restarts",
            "no effect under torchrun",
            attempt=f"torchrun --max-restarts={run.get('launcher.max_restarts')}",
        )


def run_folder(run: Run) -> tuple[str, str] | None:
    """(key, folder) that the job will write into; None where that is not known."""
    settled = HydraConfig.instance().cfg
    if run.hydra is None and settled is not None:  # inside a job: Hydra has made it
        return "run_dir", str(settled.hydra.runtime.output_dir)
    folder = run.get("run_dir")
    if run.hydra is None or not isinstance(folder, str) or run.wrong & {"run_dir", "output_dir"}:
        return ("run_dir", folder) if isinstance(folder, str) and folder else None
    try:
        if OmegaConf.select(run.hydra, "job.num") is not None:
            sweep = Path(str(run.hydra.sweep.dir))
            return "hydra.sweep.dir", str(sweep / str(run.hydra.sweep.subdir))
        chosen = str(run.hydra.run.dir)
    except OmegaConfBaseException:
        return None
    return ("run_dir", folder) if chosen == folder else ("hydra.run.dir", chosen)


def _check_folder(run: Run) -> None:
    found = run_folder(run)
    if found is None:
        return
    key, name = found
    if key in run.wrong:
        return
    if not name.strip() or "\0" in name or re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name):
        run.error(key, "not a path of this machine", value=name, attempt="run_dir=outputs/mine")
        return
    root = run.get("output_dir")
    if key == "run_dir" and "run_dir" in run.derived and isinstance(root, str) and root:
        reason = why_unwritable(Path(root))
        if reason:
            wrong = {"attempt": "output_dir=<folder>", "code": FOLDER_UNUSABLE}
            run.error("output_dir", reason, value=root, **wrong)
            return
    reason = why_unwritable(Path(name))
    if reason:
        run.error(key, reason, value=name, attempt="run_dir=<folder>", code=FOLDER_UNUSABLE)
        return
    folder = Path(name)
    resumes = run.get("ckpt_path") is not None or run.get("task") != "fit"
    if not resumes and (folder / "result.json").exists():
        run.error(
            key,
            "already holds a finished run",
            value=name,
            attempt="ckpt_path=last, or another run_dir",
            code=FOLDER_UNUSABLE,
        )
    holder = _holder(folder) if run.hydra is not None else None
    if holder:
        run.error(key, holder, value=name, attempt="another run_dir", code=FOLDER_UNUSABLE)


def _holder(folder: Path) -> str | None:
    """Who holds the run folder now; None where nobody does."""
    import fcntl

    from gptrain.resilience.lock import LOCK_NAME, read_holder

    path = folder / LOCK_NAME
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = read_holder(folder)
                pid, host = holder.get("pid", "unknown"), holder.get("host", "an unknown host")
                return f"held by process {pid} on {host}"
    except OSError:
        pass
    return None


def why_unwritable(folder: Path) -> str | None:
    """Why no file can be made in a folder that may not exist yet; None where it can.

    Tried with a file that never gets a name, so nothing is left or seen.
    """
    try:
        parent = folder.expanduser().absolute()
        while not parent.exists():
            if parent.is_symlink():
                return f"cannot write ({parent} is a link to nothing)"
            parent = parent.parent
        if not parent.is_dir():
            return (
                "a file, not a folder"
                if parent == folder.absolute()
                else (f"cannot write ({parent} is a file)")
            )
        longest = os.pathconf(parent, "PC_NAME_MAX")
        if any(len(os.fsencode(part)) > longest for part in folder.parts):
            return f"a name in it is longer than {longest} bytes"
        real = os.path.realpath(parent)
        if real == "/dev/shm" or real.startswith("/dev/shm/"):
            pass
        elif any(real == root or real.startswith(f"{root}/") for root in PSEUDO):
            return f"cannot write ({real} holds no files)"
        if not os.access(parent, os.W_OK | os.X_OK):
            return f"cannot write ({_access_reason(parent)})"
        if os.statvfs(parent).f_bavail == 0:
            return "cannot write (no space left on device)"
        _try_unnamed_file(parent)
    except OSError as error:
        return f"cannot write ({(error.strerror or str(error)).lower()})"
    return None


def _access_reason(parent: Path) -> str:
    read_only = os.statvfs(parent).f_flag & os.ST_RDONLY
    return "read-only file system" if read_only else f"no permission in {parent}"


def _try_unnamed_file(parent: Path) -> None:
    if not hasattr(os, "O_TMPFILE"):
        return
    try:
        os.close(os.open(parent, os.O_TMPFILE | os.O_WRONLY, 0o600))
    except OSError as error:
        # File systems without unnamed files answer so; they can be written all the same.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS):
            raise

"""Run a SLURM cluster of one controller and four node daemons on this machine, in one folder.

The nodes' names are addresses of the loopback interface, so that no host name has to be registered.
The cluster is stopped by the process ids that its daemons have written.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.processes import is_alive, wait_until

ROOT = Path(__file__).parents[1]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=6
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=1
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
NODES = {"main": (1, 2), "cheap": (3, 4)}  # partition -> its nodes


class Cluster:
    """Commands that a user types on the cluster.

    Attributes:
        outputs: Folder into which runs write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.outputs = folder, folder / "outputs"
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "GPTRAIN_OUTPUT_DIR": str(self.outputs),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def start(self, *command: str) -> subprocess.Popen:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=self.environment, cwd=ROOT, text=True, **streams)

    def run(self, *command: str) -> str:
        """Run a command that must succeed, and return its output."""
        process = self.start(*command)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        return output.strip()

    def submit(self, *words: str, n_nodes: int = 1, partition: str = "main") -> str:
        """Submit slurm.sh of the recipes, edited for this cluster; return the number of the job."""
        edited = {"nodes": n_nodes, "ntasks-per-node": 1, "gpus-per-node": None}
        edited |= {"cpus-per-task": 1, "output": f"{self.outputs}/slurm-%j.log"}
        lines = (ROOT / "src/recipes/slurm.sh").read_text()
        for option, value in edited.items():
            line = "" if value is None else f"#SBATCH --{option}={value} "
            lines, n_edits = re.subn(rf"#SBATCH --{option}=\S+ ?", line, lines)
            assert n_edits == 1, option
        script = self.folder / "slurm.sh"
        script.write_text(lines)
        return self.run("sbatch", "--parsable", f"--partition={partition}", str(script), *words)

    def log(self, run: Path) -> str:
        path = run.with_name(run.name + ".log")
        return path.read_text() if path.exists() else ""

    def is_queued(self, job: str) -> bool:
        return job in self.run("squeue", "--noheader", "--format=%A").split()


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    cluster, ports, host = Cluster(folder), free_ports(5), socket.gethostname().split(".")[0]
    (folder / "state").mkdir()
    cluster.outputs.mkdir()
    user = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    lines = [CONFIG.format(host=host, user=user, folder=folder, ports=ports)]
    for partition, nodes in NODES.items():
        for n in nodes:
            place = f"NodeHostName={host} NodeAddr=127.0.0.1 Port={ports[n]}"
            lines.append(f"NodeName=127.0.0.{n} {place} CPUs=8 State=UNKNOWN")
        names = ",".join(f"127.0.0.{n}" for n in nodes)
        is_default = "YES" if partition == "main" else "NO"
        lines.append(f"PartitionName={partition} Nodes={names} Default={is_default} GraceTime=60")
        if partition == "cheap":
            lines[-1] += " PriorityTier=1"
            lines.append(f"PartitionName=dear Nodes={names} PriorityTier=9 PreemptMode=OFF")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {"key-file": key, "socket": "munge.sock", "pid-file": "munged.pid"}
    files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
    try:
        options = (f"--{name}={folder / file}" for name, file in files.items())
        cluster.run("munged", "--force", *options)
        cluster.run("slurmctld", "-c")
        for n in range(1, len(ports)):
            cluster.run("slurmd", "-c", "-N", f"127.0.0.{n}")
        states = ("sinfo", "--noheader", "--Node", "--partition=main,cheap", "--format=%t")
        is_up = lambda: cluster.start(*states).communicate()[0].split() == ["idle"] * 4  # noqa: E731
        wait_until(is_up, 30, (folder / "slurmctld.log").read_text)
        yield cluster
    finally:
        stop(cluster)


def stop(cluster: Cluster) -> None:
    """Cancel all jobs, then stop the daemons, those of the nodes first."""
    with suppress(AssertionError, OSError):
        cluster.run("scancel", "--user", str(os.getuid()))
        wait_until(lambda: not cluster.run("squeue", "--noheader"), 20)
    for pattern in ("slurmd-*.pid", "slurmctld.pid", "munged.pid"):
        for path in cluster.folder.glob(pattern):
            stop_daemon(path)


def stop_daemon(pid_file: Path) -> None:
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_alive(pid), 15)


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for server in sockets:
            server.bind(("127.0.0.1", 0))
        return [server.getsockname()[1] for server in sockets]

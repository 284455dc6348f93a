"""Emulate nodes with network namespaces. Each has its own address and host name; a cable joins two.

A node's own name is 127.0.1.1 in its hosts file, as Debian sets it up. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORT = 29400
# A lost node is noticed after 6 s (default: 15), and a late node is awaited for 5 s (default: 30).
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=5"
HOSTS = "127.0.0.1 localhost\n127.0.1.1 {}\n10.79.0.{} {}\n"


class Node:
    """A network namespace with an address, a host name and a hosts file of its own."""

    def __init__(self, name: str, hosts: str):
        self.name, self.namespace = name, f"gptrain-{os.getpid()}-{name}"
        run("ip", "netns", "add", self.namespace)
        self.etc = Path("/etc/netns") / self.namespace
        self.etc.mkdir(parents=True)
        (self.etc / "hosts").write_text(hosts)

    def start(
        self, log: Path, *words: str, nodes: str = "2", restarts: int = 3, before: str = ""
    ) -> subprocess.Popen:
        """Start an agent of torchrun on this node, after the shell command `before`."""
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
            "--nproc_per_node=1", f"--max-restarts={restarts}", "--rdzv_backend=c10d",
            f"--rdzv_endpoint=a:{PORT}", "--rdzv_id=1", f"--rdzv-conf={RENDEZVOUS}",
            "train.py", *words,
        ]  # fmt: skip
        script = f'hostname "$0" && {before or "true"} && exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "-u", "sh", "-c", script]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        environment["GLOO_SOCKET_IFNAME"] = "cable"  # the name of the node is no address
        with open(log, "ab") as file:
            return subprocess.Popen(
                [*inside, self.name, *command],
                cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill(self) -> None:
        """Kill all processes of this node at once, as in a power cut."""
        for pid in run("ip", "netns", "pids", self.namespace).split():
            os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        self.kill()
        run("ip", "netns", "del", self.namespace)
        shutil.rmtree(self.etc)
        with suppress(OSError):  # other nodes still use the folder
            self.etc.parent.rmdir()


@contextmanager
def two_nodes() -> Generator[list[Node]]:
    """Yield nodes a and b, which are joined by a cable.

    Raises:
        CalledProcessError: If this user cannot create network namespaces.
        OSError: If iproute2 is not installed or /etc/netns cannot be written.
    """
    with ExitStack() as stack:
        nodes = []
        for name, hosts in (("a", HOSTS.format("a", 2, "b")), ("b", HOSTS.format("b", 1, "a"))):
            nodes.append(Node(name, hosts))
            stack.callback(nodes[-1].remove)
        a, b = (node.namespace for node in nodes)
        run("ip", "link", "add", "cable", "netns", a, "type", "veth", "peer", "cable", "netns", b)
        for number, namespace in enumerate((a, b), 1):
            run("ip", "-n", namespace, "addr", "add", f"10.79.0.{number}/24", "dev", "cable")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
            run("ip", "-n", namespace, "link", "set", "cable", "up")
        yield nodes


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

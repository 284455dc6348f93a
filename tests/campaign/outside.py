"""Real commands seen from outside: their processes, their sockets, and a fault under torchrun."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gptrain.config.schema import PROJECT
from gptrain.resilience.status import read_status
from tests.campaign.lab import TINY, Lab

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def torchrun_restarts(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """torchrun starts lost ranks again; they go on from the newest checkpoint by themselves."""
    run_dir = lab.new("torchrun")
    options = [*TINY, f"run_dir={run_dir}", "trainer.max_steps=100000"]
    agent = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1"]
    with (lab.folder / f"{run_dir.name}.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *agent, "train.py", *options], cwd=PROJECT, stdout=log, stderr=log
        )
        try:
            wait_for(run_dir / "checkpoints/step-00000020", process)
            # Parents come first: the rank before its data workers, which inherit its variables.
            rank_1 = next(pid for pid in family(process.pid) if variable(pid, "RANK") == "1")
            os.kill(rank_1, signal.SIGKILL)
            newest = max((run_dir / "checkpoints").glob("step-????????"))
            wait_for(newest.with_name(f"step-{int(newest.name[5:]) + 100:08d}"), process)
            ranks = [pid for pid in family(process.pid) if variable(pid, "RANK")]
            if not {name for pid in ranks for name in listeners(pid)} <= LOOPBACK:
                return "a rank listens beyond loopback"
            os.kill(draw.choice(ranks[:2]), signal.SIGTERM)
            if process.wait(60) == 0:
                return "torchrun ended with 0"
            if (code := (read_status(run_dir) or {}).get("exit_code")) != 75:
                return f"status.json says {code}"
            log.seek(0)
            return None if "from step" in log.read() else "it did not go on from a checkpoint"
        finally:
            for pid in family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def wait_for(path: Path, process: subprocess.Popen) -> None:
    wait_until(lambda: path.exists() or process.poll() is not None, timeout_s=200)
    assert path.exists()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def family(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            parents[int(entry.name)] = int(state(int(entry.name))[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def is_alive(pid: int) -> bool:
    return state(pid)[0] not in "ZX"


def state(pid: int) -> list[str]:
    """State and parent of a process, from proc(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


def listeners(pid: int) -> list[str]:
    """Local addresses, in the kernel's hexadecimal, on which a process listens."""
    found, sockets = [], set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # TCP_LISTEN
                found.append(fields[1].partition(":")[0])
    return found


def variable(pid: int, name: str) -> str | None:
    """Of a process's environment."""
    pairs = (
        pair.partition("=")
        for pair in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    )
    return next((value for key, _, value in pairs if key == name), None)

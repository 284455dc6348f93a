"""What a result was made by: code, versions, command, machine. Kept in result.json."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig

from gptrain.launch.devices import Machine

PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "torchmetrics", "numpy")
GIT_S = 3.0  # on a slow file system the answer is not worth more


def describe_run(machine: Machine) -> dict[str, object]:
    """The facts of a run that is about to start, for whoever compares it with another."""
    versions = {name: version(name) for name in PACKAGES}
    is_typed = HydraConfig.initialized()  # not in a process of the bench
    return {
        "started": time.strftime("%F %T %z"),
        "command": shlex.join(["python", *sys.argv]),
        "overrides": list(HydraConfig.get().overrides.task) if is_typed else [],
        "git": read_git(Path(__file__).parent),
        "versions": {"python": platform.python_version(), **versions},
        "host": socket.gethostname(),
        "devices": f"{machine.world_size} x {device_name(machine)}",
        "threads": torch.get_num_threads(),  # of a rank
    }


@functools.cache  # a process has imported its code once
def read_git(folder: Path) -> dict[str, object] | None:
    """Commit of the repository around folder, and whether anything in it, new files too, differs.

    None without a repository or git.
    """
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # only look
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_S, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    head, *lines = said.stdout.splitlines()  # "# branch.oid 0123abcd", more of these, changed files
    return {
        "commit": head.removeprefix("# branch.oid "),
        "dirty": any(not line.startswith("#") for line in lines),
    }


def device_name(machine: Machine) -> str:
    """The model of the GPU, or of the processor as Linux calls it."""
    if machine.accelerator == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{machine.accelerator} ({name})"

"""What a result was made by: code, versions, command, machine. Kept in result.json."""

from __future__ import annotations

import functools
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig

from gptrain.core import shell
from gptrain.core.locations import LIBRARY, find_project
from gptrain.runtime.devices import RunDevices

PACKAGES = ("lightning", "hydra-core", "omegaconf", "torchmetrics", "numpy")
GIT_S = 3.0  # on a slow file system the answer is not worth more


def describe_run(machine: RunDevices) -> dict[str, object]:
    """The facts of a run that is about to start, for whoever compares it with another."""
    is_typed = HydraConfig.initialized()  # not in a process of the bench
    device = f"{machine.accelerator} ({platform.machine()})"
    if machine.accelerator == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "command": shell.command("python", *sys.argv),
        "overrides": list(HydraConfig.get().overrides.task) if is_typed else [],
        "git": read_git(find_project() or LIBRARY),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # with its build, as +cu132
            **{package: version(package) for package in PACKAGES},
        },
        "host": socket.gethostname(),
        "devices": f"{machine.world_size} x {device}",
        "threads": torch.get_num_threads(),  # of a rank
    }


@functools.cache  # a process has imported its code once
def read_git(folder: Path) -> dict[str, object] | None:
    """Commit around folder, and whether anything differs from it; None without git."""
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # only look
    try:
        said = subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL, timeout=GIT_S, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    head, *lines = said.splitlines()  # "# branch.oid 0123abcd", more of these, changed files
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"commit": head.removeprefix("# branch.oid "), "dirty": is_dirty}

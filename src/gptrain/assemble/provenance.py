"""Provenance of a result, kept in result.json: code, versions, command, host and devices."""

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
GIT_S = 3.0  # time limit of git, which may be slow on a network file system


def describe_run(devices: RunDevices) -> dict[str, object]:
    """Return the provenance of a run that is about to start, for result.json.

    The keys are `command`, `overrides` (those that were typed; empty without Hydra), `git` (result
    of `read_git`), `versions`, `host`, `devices` (such as `8 x NVIDIA H100`) and `threads` (of one
    rank). All values can be written as JSON. Runs git, for a few seconds at most.

    Args:
        devices: Devices of the run.
    """
    is_hydra_command = HydraConfig.initialized()  # False in tests/tools/bench
    device = f"{devices.accelerator} ({platform.machine()})"
    if devices.accelerator == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "command": shell.command("python", *sys.argv),
        "overrides": list(HydraConfig.get().overrides.task) if is_hydra_command else [],
        "git": read_git(find_project() or LIBRARY),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # includes the build, such as +cu132
            **{package: version(package) for package in PACKAGES},
        },
        "host": socket.gethostname(),
        "devices": f"{devices.world_size} x {device}",
        "threads": torch.get_num_threads(),
    }


@functools.cache  # the code of this process was imported once and does not change
def read_git(folder: Path) -> dict[str, object] | None:
    """Return the commit of the repository around a folder, and whether files differ from it.

    The result is computed once per process.

    Args:
        folder: Folder of the project or of the library.

    Returns:
        {"commit": hash, "dirty": bool}, or None if git or a repository is missing or git is slow.
    """
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # do not write the index
    try:
        output = subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL, timeout=GIT_S, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    head, *lines = output.splitlines()  # "# branch.oid 0123abcd", more headers, changed files
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"commit": head.removeprefix("# branch.oid "), "dirty": is_dirty}

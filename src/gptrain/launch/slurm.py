"""Ranks that SLURM started: where they meet. srun names the nodes, but no address and no port."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from gptrain.parallel.mesh import STORE_VARIABLE

PORTS = range(20000, 30000)  # below those that Linux gives to clients


def meet() -> None:
    """Lets the process group of a step be made: at a file on one node, else at its first node.

    MASTER_ADDR and MASTER_PORT, where the job script sets them, are obeyed.
    """
    environment = os.environ
    job, step = int(environment["SLURM_JOB_ID"]), environment.get("SLURM_STEP_ID", "0")
    if "MASTER_ADDR" not in environment and environment.get("SLURM_STEP_NUM_NODES") == "1":
        name = f"gptrain-{os.getuid()}-slurm-{job}-{step}-{environment.get('SLURM_RESTART_COUNT')}"
        environment.setdefault(STORE_VARIABLE, str(Path(tempfile.gettempdir()) / name))
        return
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(PORTS[job % len(PORTS)]))


def first_host(nodes: str) -> str:
    """Of a node list as SLURM writes it: `gpu[003-007,9],login1` -> `gpu003`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]

"""Where ranks that torchrun or SLURM started meet; those of our own supervisor meet at its file."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from gptrain.launch.process import parent_start_s, this_process
from gptrain.parallel.mesh import STORE_VARIABLE

PORTS = range(20000, 30000)  # below those that Linux gives to clients


def set_rendezvous() -> None:
    """Says in the environment where the process group is made: at a file where one node is used.

    torchrun's own store listens on all interfaces, and over its restarts the ranks find keys of
    the attempt before in it and wait for ranks that are gone (pytorch#135712); on several nodes set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. srun names the nodes, but no address and no port;
    MASTER_ADDR and MASTER_PORT, where the job script sets them, are obeyed.
    """
    env, launcher = os.environ, this_process().launcher
    on_one_node = {
        "torchrun": env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"),
        "slurm": env.get("SLURM_STEP_NUM_NODES") == "1" and "MASTER_ADDR" not in env,
    }
    if on_one_node.get(launcher):
        name = f"gptrain-{os.getuid()}-{attempt()}"
        env.setdefault(STORE_VARIABLE, str(Path(tempfile.gettempdir()) / name))
    elif launcher == "slurm":
        env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(PORTS[int(env["SLURM_JOB_ID"]) % len(PORTS)]))


def attempt() -> str:
    """A name of this start of the job: the same in all its ranks, and of no other start."""
    env, launcher = os.environ, this_process().launcher
    if launcher == "slurm":
        step, restart = env.get("SLURM_STEP_ID", "0"), env.get("SLURM_RESTART_COUNT", "0")
        return f"slurm-{env['SLURM_JOB_ID']}-{step}-{restart}"
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):
        return f"{os.getppid()}-{parent_start_s():.2f}-{restart}"
    job = f"{env.get('TORCHELASTIC_RUN_ID')}-{env.get('MASTER_PORT')}"  # of agents on many nodes
    return f"{re.sub('[^A-Za-z0-9_-]', '_', job)}-{restart}"


def first_host(nodes: str) -> str:
    """Of a node list as SLURM writes it: `gpu[003-007,9],login1` -> `gpu003`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]

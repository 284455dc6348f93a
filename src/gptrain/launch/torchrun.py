"""Ranks that torchrun started on one machine: they meet at a file, as those of our own launcher."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gptrain.launch.process import parent_start_s
from gptrain.parallel.mesh import STORE_VARIABLE


def meet_at_a_file() -> None:
    """Lets the process group of one node be made without a port, and anew after each restart.

    torchrun's own store listens on all interfaces, and over its restarts the ranks find keys of
    the attempt before in it and wait for ranks that are gone (pytorch#135712).
    """
    environment = os.environ
    if environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        return  # several nodes: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where ranks are restarted
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent = f"{os.getppid()}-{parent_start_s():.2f}"
    name = f"gptrain-{os.getuid()}-{agent}-{environment.get('MASTER_PORT')}-{attempt}"
    environment.setdefault(STORE_VARIABLE, str(Path(tempfile.gettempdir()) / name))

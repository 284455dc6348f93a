"""Whether another start is worth it: counted in the run folder, so that it outlives any process."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gptrain.resilience import fileops

NAME = ".restarts"
FRUITLESS_STARTS = 3  # without a newer checkpoint: the fault is not chance, a restart cannot help


def is_restart() -> bool:
    """True where torchrun or SLURM started this job again by itself."""
    counts = (
        os.environ.get(name) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )
    return any(int(count or 0) > 0 for count in counts)


def note_start(run_dir: str | Path, step: int, again: bool) -> int:
    """Notes a start from `step` and returns how many in a row got no further than the one before.

    Args:
        again: the launcher starts by itself; a person's start counts from anew.
    """
    path, fruitless = Path(run_dir) / NAME, 0
    if again and path.exists():
        before = json.loads(path.read_bytes())
        fruitless = 0 if step > before["step"] else before["fruitless"] + 1
    fileops.replace(path, json.dumps({"step": step, "fruitless": fruitless}).encode())
    return fruitless

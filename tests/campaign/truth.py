"""What a run leaves that must not depend on what befell it, and where two runs differ."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import Any

CLOCKS = ("perf/", "epoch")  # columns of metrics.csv that hold times


def record(run_dir: Path) -> dict[str, Any]:
    """Parts of the last checkpoint, micro-steps of each rank, and rows of metrics.csv.

    Raises: AssertionError if a micro-step that was done twice was not done alike.
    """
    found: dict[str, Any] = final_state(run_dir)
    for path in run_dir.glob("witness-*.txt"):
        for line in path.read_text().splitlines():
            number, _, rest = line.partition(" ")
            key = f"micro-step {path.stem} {number}"
            before = found.setdefault(key, rest)
            assert before == rest, f"{key}: {before}, then {rest}"
    with (run_dir / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            values = {key: row[key] for key in row if row[key] and not key.startswith(CLOCKS)}
            found[f"row {row['step']}"] = values
    return found


def difference(run_dir: Path, reference: dict[str, Any]) -> str | None:
    """Where a run differs from the reference; None where it is equal bit for bit."""
    try:
        mine = record(run_dir)
    except (AssertionError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    keys = reference.keys() | mine.keys()
    parts = sorted(key for key in keys if mine.get(key) != reference.get(key))
    return f"it differs in {', '.join(parts[:9])}" if parts else None


def final_state(run_dir: Path) -> dict[str, str]:
    """SHA-256 of each part: weights, optimizer, schedule, random numbers of all ranks, counters."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    newest = max((run_dir / "checkpoints").glob("step-????????"))
    state = torch.load(newest / "state.ckpt", weights_only=True)
    if (newest / ".metadata").exists():
        dcp_to_torch_save(newest, run_dir / "shards.pt")
        state["shards"] = torch.load(run_dir / "shards.pt", weights_only=True)
    return {"newest": newest.name, **{key: digest(value) for key, value in state.items()}}


def digest(value: Any) -> str:
    """SHA-256 of a nest of plain values and tensors."""
    if isinstance(value, dict):
        parts = [f"{key}:{digest(value[key])}" for key in sorted(value, key=str)]
    elif isinstance(value, list | tuple):
        parts = [digest(item) for item in value]
    elif hasattr(value, "numpy"):
        content = value.contiguous().numpy().tobytes()
        parts = [str(value.dtype), str(tuple(value.shape)), hashlib.sha256(content).hexdigest()]
    else:
        parts = [repr(value)]
    return hashlib.sha256(";".join(parts).encode()).hexdigest()


def repeated(run_dir: Path) -> int:
    """Micro-steps of rank 0 that were done more than once."""
    path = run_dir / "witness-0.txt"
    numbers = [line.split()[0] for line in path.open()] if path.exists() else []
    return len(numbers) - len(set(numbers))

"""What a run leaves that must not depend on what befell it, and where two runs differ."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gptrain.checkpoints.amendment import load_state


def record(run_dir: Path) -> dict[str, Any]:
    """Parts of the last checkpoint (weights, optimizer, schedule, random numbers of all ranks,
    counters), micro-steps of each rank, and rows of metrics.csv.

    Raises: AssertionError if a micro-step that was done twice was not done alike.
    """
    newest = max((run_dir / "checkpoints").glob("step-????????"))
    state = load_state(newest)
    if (newest / ".metadata").exists():
        dcp_to_torch_save(newest, run_dir / "shards.pt")
        state["shards"] = torch.load(run_dir / "shards.pt", weights_only=True)
    found: dict[str, Any] = {key: digest(value) for key, value in state.items()}
    for path in run_dir.glob("witness-*.txt"):
        for line in path.read_text().splitlines():
            number, _, rest = line.partition(" ")
            before = found.setdefault(f"{path.stem} {number}", rest)
            assert before == rest, f"{path.stem} {number}: {before}, then {rest}"
    with (run_dir / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            values = {key: row[key] for key in row if row[key] and "perf/" not in key}
            found[f"row {row['step']}"] = values  # without times
    return found


def difference(run_dir: Path, reference: dict[str, Any]) -> str | None:
    """Where a run differs from the reference; None where it is equal bit for bit.

    Lightning logs a step after its save: killed in between, a run goes on without that row.
    """
    mine = record(run_dir)
    starts = json.loads((run_dir / ".restarts").read_text())["starts"]
    cut_off = {f"row {start['step']}" for start in starts} - mine.keys()
    keys = (reference.keys() | mine.keys()) - cut_off
    parts = sorted(key for key in keys if mine.get(key) != reference.get(key))
    return f"it differs in {', '.join(parts[:9])}" if parts else None


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

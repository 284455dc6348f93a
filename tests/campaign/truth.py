"""What a run leaves that must not depend on what befell it, and where two runs differ."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import Any

CLOCKS = ("perf/", "epoch")  # columns of metrics.csv that hold times


def record(run_dir: Path) -> dict[str, Any]:
    """All of it, of a run that was done on the same ranks all the time."""
    witnesses = sorted(run_dir.glob("witness-*.txt"))
    return {
        "state": final_state(run_dir),
        "losses": [micro_steps(path) for path in witnesses],
        "curve": curve(run_dir),
    }


def difference(run_dir: Path, reference: dict[str, Any]) -> str | None:
    """Where a run differs from the reference; None where it is equal bit for bit."""
    try:
        mine = record(run_dir)
    except (AssertionError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    for part, found in mine.items():
        expected = reference[part]
        if found != expected:
            pairs = found if isinstance(found, dict) else dict(enumerate(found))
            others = expected if isinstance(expected, dict) else dict(enumerate(expected))
            names = [
                key for key in pairs.keys() | others.keys() if pairs.get(key) != others.get(key)
            ]
            return f"{part} differs in {names}"
    return None


def final_state(run_dir: Path) -> dict[str, str]:
    """SHA-256 of each part of the last checkpoint: weights, optimizer, random numbers, counters."""
    import torch

    newest = max((run_dir / "checkpoints").glob("step-????????"))
    state = torch.load(newest / "state.ckpt", weights_only=True)
    if (newest / ".metadata").exists():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        whole = run_dir / "whole.pt"
        dcp_to_torch_save(newest, whole)
        state["shards"] = torch.load(whole, weights_only=True)
    return {"step": newest.name, **{key: digest(value) for key, value in state.items()}}


def digest(value: Any) -> str:
    """SHA-256 of a nest of plain values and tensors."""
    seal = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, dict):
            for key in sorted(item, key=str):
                seal.update(f"{key}:".encode())
                add(item[key])
        elif isinstance(item, list | tuple):
            for part in item:
                add(part)
        elif hasattr(item, "numpy"):
            seal.update(f"{item.dtype}{tuple(item.shape)}".encode())
            seal.update(item.contiguous().numpy().tobytes())
        else:
            seal.update(f"{item!r};".encode())

    add(value)
    return seal.hexdigest()


def micro_steps(witness: Path) -> dict[str, str]:
    """Micro-step of a rank -> step, batch and loss.

    Raises: AssertionError if a micro-step that was done twice was not done alike.
    """
    found: dict[str, str] = {}
    for line in witness.read_text().splitlines():
        number, _, rest = line.partition(" ")
        before = found.setdefault(number, rest)
        assert before == rest, f"{witness.name}, {number}: {before}, then {rest}"
    return found


def repeated(run_dir: Path, rank: int = 0) -> int:
    """Micro-steps of a rank that were done more than once."""
    numbers = [line.split()[0] for line in (run_dir / f"witness-{rank}.txt").open()]
    return len(numbers) - len(set(numbers))


def curve(run_dir: Path) -> list[dict[str, str]]:
    """metrics.csv without its times."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if value and not key.startswith(CLOCKS)}
            for row in csv.DictReader(file)
        ]

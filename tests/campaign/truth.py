"""What a run leaves that must not depend on what befell it, and where two runs differ."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import Any

from tests.campaign.plant import WITNESS

CLOCKS = ("perf/", "epoch")  # columns of metrics.csv that hold times


def final_state(run_dir: Path) -> dict[str, str]:
    """SHA-256 of each part of the last checkpoint: weights, optimizer, random numbers, counters."""
    from gptrain.resilience.safe_load import load_file

    newest = max((run_dir / "checkpoints").glob("step-????????"))
    state = load_file(newest / "state.ckpt")
    if (newest / ".metadata").exists():
        state["shards"] = whole(newest)
    return {"step": newest.name, **{key: digest(value) for key, value in state.items()}}


def whole(checkpoint: Path) -> dict[str, Any]:
    """All tensors of a sharded checkpoint, put together; names in order."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from gptrain.resilience.safe_load import SafeFileSystemReader

    state: dict[str, Any] = {}
    reader, planner = SafeFileSystemReader(checkpoint), _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return dict(sorted(state.items()))


def digest(value: Any) -> str:
    """SHA-256 of a nest of plain values and tensors."""
    seal = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, dict):
            for key in item:
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


def losses(run_dir: Path, rank: int) -> dict[int, str]:
    """Micro-step -> the batch it saw and the loss it gave.

    Raises: AssertionError if a micro-step that was done twice was not done alike.
    """
    found: dict[int, str] = {}
    for line in (run_dir / WITNESS.format(rank=rank)).read_text().splitlines():
        number, _, rest = line.partition(" ")
        before = found.setdefault(int(number), rest)
        assert before == rest, f"rank {rank}, micro-step {number}: {before}, then {rest}"
    return found


def redone(run_dir: Path, rank: int) -> int:
    """Micro-steps of a rank that were done more than once."""
    numbers = [line.split()[0] for line in (run_dir / WITNESS.format(rank=rank)).open()]
    return len(numbers) - len(set(numbers))


def curve(run_dir: Path) -> list[dict[str, str]]:
    """metrics.csv without its times."""
    path = run_dir / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {key: value for key, value in row.items() if value and not key.startswith(CLOCKS)}
            for row in csv.DictReader(file)
        ]


def record(run_dir: Path) -> dict[str, Any]:
    """All of it, of a run that was done on the same ranks all the time."""
    n_ranks = len(list(run_dir.glob("witness-*.txt")))
    return {
        "state": final_state(run_dir),
        "losses": [losses(run_dir, rank) for rank in range(n_ranks)],
        "curve": curve(run_dir),
    }


def difference(run_dir: Path, reference: dict[str, Any]) -> str | None:
    """Where a run differs from the reference; None where it is equal bit for bit."""
    try:
        mine = record(run_dir)
    except (AssertionError, OSError, ValueError) as error:
        return str(error)
    parts = [key for key, value in reference["state"].items() if mine["state"].get(key) != value]
    if parts:
        return f"final state differs in {', '.join(parts)}"
    for rank, (ours, theirs) in enumerate(zip(mine["losses"], reference["losses"], strict=True)):
        if ours != theirs:
            first = min(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
            return f"rank {rank} differs from micro-step {first} on"
    if mine["curve"] != reference["curve"]:
        return "metrics.csv differs"
    return None

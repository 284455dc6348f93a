"""Results of a run that must not depend on an injected fault, and the comparison of two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.run import read_state, same


def record(run_dir: Path) -> dict[str, Any]:
    """Return what a run has computed: its last checkpoint, micro-steps and rows of metrics.jsonl.

    The options of the callback that injects the fault are left out, because the run without the
    fault has no such callback.

    Raises:
        AssertionError: If a micro-step that was done twice had different results, or a step has
            two rows.
    """
    newest = max((run_dir / "checkpoints").glob("step-????????"))
    state = read_state(newest)
    state["counters"].get("options", {}).pop("callbacks.fault", None)
    results: dict[str, Any] = dict(state)
    for path in run_dir.glob("witness-*.txt"):
        for line in path.read_text().splitlines():
            number, _, rest = line.partition(" ")
            before = results.setdefault(f"{path.stem} {number}", rest)
            assert before == rest, f"{path.stem} {number}: {before}, then {rest}"
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        name = f"row {row['step']}"
        assert name not in results, f"{name} is there twice"
        # perf/ values are times, which differ between equal runs
        results[name] = {key: value for key, value in row.items() if "perf/" not in key}
    return results


def difference(run_dir: Path, reference: dict[str, Any]) -> str | None:
    """Return how a run differs from the reference, or None if it is equal bit for bit."""
    differences = same(record(run_dir), reference)
    return f"it differs: {', '.join(differences[:9])}" if differences else None


def repeated(run_dir: Path) -> int:
    """Return the number of micro-steps that rank 0 has repeated."""
    path = run_dir / "witness-0.txt"
    numbers = [line.split()[0] for line in path.open()] if path.exists() else []
    return len(numbers) - len(set(numbers))

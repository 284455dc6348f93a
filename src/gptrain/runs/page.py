"""One self-contained page of runs: table, curves, what differs, endings and restarts."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptrain.resilience import fileops
from gptrain.runs.folder import RunRecord, read_config
from gptrain.runs.table import names, same, varied
from gptrain.small_files import UnreadableFile, read_bytes, read_json

TEMPLATE = Path(__file__).with_name("page.html")
# Logged name -> TensorBoard's tag. It sorts its sections by what stands before the slash: so losses
# come first, then the optimizer, then perf/*. A name that is not here is its own tag.
TAGS = {
    "train/loss": "loss/train",
    "val/loss": "loss/val",
    "test/loss": "loss/test",
    "lr": "optim/lr",
    "grad_norm": "optim/grad_norm",
    "tokens": "perf/tokens",
}
N_POINTS = 500  # of a curve
MAX_CSV_BYTES = 2**26


def write_page(path: Path, runs: Sequence[RunRecord], metric: str) -> None:
    """Writes the page; runs in their order, the first is the best. Raises: OSError."""
    configs = [read_config(run.path) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if "_dir" not in key)
    differ = [
        key for key in keys if not all(same(c.get(key), configs[0].get(key)) for c in configs)
    ]
    shown = []
    for run, name, config in zip(runs, names(runs), configs, strict=True):
        known = ("typed", "metrics", "steps", "seconds", "ended", "detail")
        facts = {key: getattr(run, key) for key in known} | {"name": name}
        facts |= {"config": {key: config.get(key) for key in differ}, "path": str(run.path)}
        shown.append(facts | {"curves": read_curves(run.path), "starts": read_starts(run.path)})
    data = {"metric": metric, "varied": varied(runs), "runs": shown}
    text = json.dumps(data, default=str).replace("<", "\\u003c")  # ends no script
    fileops.replace(path, TEMPLATE.read_text().replace("{/*runs*/}", text).encode())


def read_curves(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Logged name -> points (step, value), of metrics.csv or of TensorBoard's events."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    curves: dict[str, list[tuple[float, float]]] = {}
    if (folder / "metrics.csv").exists():
        lines = read_bytes(folder / "metrics.csv", MAX_CSV_BYTES).decode(errors="replace")
        for row in csv.DictReader(lines.splitlines()):
            for name in row.keys() - {"step"} if row.get("step") else ():
                if row[name]:
                    curves.setdefault(name, []).append((float(row["step"]), float(row[name])))
        return {k: points[:: len(points) // N_POINTS + 1] for k, points in curves.items()}
    if not all(file.is_file() for file in folder.glob("*tfevents*")):
        return {}  # a pipe would block
    events, logged = (
        EventAccumulator(str(folder), {SCALARS: N_POINTS}),
        {t: n for n, t in TAGS.items()},
    )
    for tag in events.Reload().Tags()[SCALARS]:
        curves[logged.get(tag, tag)] = [(one.step, one.value) for one in events.Scalars(tag)]
    return curves


def read_starts(folder: Path) -> list[Any]:
    """Each start of the run: step, time, and how the one before had ended."""
    try:
        return list(read_json(folder / ".restarts")["starts"])
    except (OSError, UnreadableFile, LookupError, TypeError):
        return []

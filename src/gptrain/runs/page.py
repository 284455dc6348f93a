"""One self-contained page of runs: table, curves, what differs, endings and restarts."""

from __future__ import annotations

import csv
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptrain.problems import DONE, Problem
from gptrain.resilience import fileops
from gptrain.resilience.status import to_json
from gptrain.runs.folder import RunRecord, as_kind
from gptrain.runs.table import differing, names
from gptrain.small_files import read_bytes, read_facts

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
    differ, shown = differing([run.config for run in runs]), []
    for run, name in zip(runs, names(runs), strict=True):
        facts = dataclasses.asdict(run) | {"name": name, "typed": run.typed}
        facts["starts"] = as_kind(list, read_facts(run.path / ".restarts").get("starts"))
        facts["config"] = {key: run.config.get(key) for key in differ}
        shown.append(facts | {"curves": read_curves(run.path)})
    varied = differing([run.typed for run in runs])
    data = {"metric": metric, "varied": varied, "differ": differ, "runs": shown}
    text = to_json(data).decode().replace("<", "\\u003c")  # ends no script
    fileops.replace(path, TEMPLATE.read_text().replace("{/*runs*/}", text).encode())


def read_curves(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Logged name -> points (step, value) that are finite, of metrics.csv or TensorBoard's events.

    A file that cannot be read is a warning.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    path = folder / "metrics.csv"
    try:
        for name, *point in _csv_points(path) if path.exists() else _event_points(folder):
            if all(map(math.isfinite, point)):
                curves.setdefault(name, []).append(tuple(point))
    except (OSError, ValueError, TypeError, csv.Error) as error:
        print(Problem("", None, f"{folder}: no curves: {error}", code=DONE).line, file=sys.stderr)
    return {name: points[:: len(points) // N_POINTS + 1] for name, points in curves.items()}


def _csv_points(path: Path) -> Iterator[tuple[str, float, float]]:
    lines = read_bytes(path, MAX_CSV_BYTES).decode(errors="replace").splitlines()
    for row in csv.DictReader(lines):
        step = row.pop("step", None)
        for name, value in row.items():
            if step and value:
                yield name, float(step), float(value)


def _event_points(folder: Path) -> Iterator[tuple[str, float, float]]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    if not all(file.is_file() for file in folder.glob("*tfevents*")):
        return  # a pipe would block
    events = EventAccumulator(str(folder), {SCALARS: N_POINTS}).Reload()
    logged = {tag: name for name, tag in TAGS.items()}
    for tag in events.Tags()[SCALARS]:
        for one in events.Scalars(tag):
            yield logged.get(tag, tag), one.step, one.value

"""Reads what runs were and how they ended from their folders, and compares them in a table.

A folder may come from anybody: its small files are parsed, and nothing in them is executed.
"""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptrain.checkpoints.goodput import ENTRIES, measure
from gptrain.checkpoints.lock import is_held
from gptrain.checkpoints.manifest import DamagedCheckpointError, read_manifest
from gptrain.checkpoints.status import CHECKPOINTS_NAME, RESULT_NAME, read_status
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core.errors import DONE, printable
from gptrain.core.shell import by_key
from gptrain.core.small_files import flatten, read_facts, read_values

_OVERRIDES, _CONFIG = ".hydra/overrides.yaml", ".hydra/config.yaml"
SHOWN = ("train/loss", "val/loss", "test/loss", "perf/tokens_per_s")  # metrics after the objective
# Endings of keys that hold a location: equal runs may have different ones.
_LOCATION_KEYS = ("_dir", "dirpath", "from_run", "ckpt_path")
_CELL = 32  # maximum width of a value, in characters; the column `ended` is not cut


@dataclass(frozen=True)
class RunRecord:
    """One run, as its folder describes it.

    Attributes:
        path: Folder of the run.
        overrides: Overrides as they were typed.
        metrics: Logged name -> value, the final one, or that of the newest checkpoint if the run is
            not done. Values that are not finite are missing.
        times: `steps`, `seconds`, `goodput` and the seconds of each phase, such as `steps_s`.
            Values that are not known are missing.
        is_done: True if the run reached its own end.
        ended: Reason of the end, such as "steps done", "running" or "lost".
        detail: Explanation of the end, or an empty string.
    """

    path: Path
    overrides: list[str]
    metrics: dict[str, float]
    times: dict[str, float]
    is_done: bool
    ended: str
    detail: str


def read_runs(folders: Iterable[Path]) -> list[RunRecord]:
    """Return the runs at or below each folder, each once, sorted by path within a folder.

    A folder of a run has `.hydra/overrides.yaml`. A run that cannot be read is left out, with a
    warning on stderr.
    """
    runs = []
    files = (file for folder in folders for file in sorted(folder.rglob(_OVERRIDES)))
    for path in dict.fromkeys(file.parents[1] for file in files):
        try:
            runs.append(read_run(path))
        except Exception as error:  # a file of another form than gptrain's may cause any
            print(f"warning: {printable(f'{path}: {error}')}", file=sys.stderr)
    return runs


def read_run(folder: Path) -> RunRecord:
    """Return the record of the run in a folder.

    Raises an OSError if there is no run, and any Exception if one of its files is damaged.
    """
    overrides = [str(word) for word in read_values(folder / _OVERRIDES)]
    result = read_values(folder / RESULT_NAME) if (folder / RESULT_NAME).exists() else {}
    status, is_running = read_status(folder) or {}, is_held(folder)
    is_done = bool(status or result) and status.get("exit_code", DONE) == DONE and not is_running
    if is_done:
        facts, ending = result, result.get("ended", {})
        ended, detail = ending.get("reason", "done"), ending.get("detail", "")
    else:
        facts, newest = status, CheckpointStore(folder / CHECKPOINTS_NAME).newest()
        with suppress(DamagedCheckpointError):
            facts = read_manifest(newest).model_dump() if newest else status
        ended = "running" if is_running else status.get("cause", "lost")
        detail = str(status.get("message", "")).removeprefix("error: ")
    metrics = _finite(facts.get("metrics", {}))
    metrics.pop("step", None)  # Lightning adds it to the metrics of a checkpoint
    times = {name: facts.get(name) for name in ("steps", "seconds", *ENTRIES)}
    times |= {"steps": facts.get("steps", facts.get("step"))} | measure(facts.get("phase_s", {}))
    return RunRecord(folder, overrides, metrics, _finite(times), is_done, str(ended), str(detail))


def _finite(values: dict[str, Any]) -> dict[str, float]:
    """Return the entries that are finite numbers."""
    return {k: v for k, v in values.items() if type(v) in (int, float) and math.isfinite(v)}


# Comparison


def rank_runs(runs: Sequence[RunRecord]) -> tuple[str, list[RunRecord]]:
    """Return the name of the objective, and the runs sorted by it, the best first.

    The last run in `runs` whose config can be read determines the objective, and by
    `checkpoint.mode` whether the smallest or the largest value is the best. Without one it is the
    smallest val/loss. Runs without the metric come last.
    """
    configs = (flatten(read_facts(run.path / _CONFIG)) for run in reversed(runs))
    config = next(filter(None, configs), {})
    metric = str(config.get("objective", "val/loss"))
    sign = -1 if config.get("checkpoint.mode") == "max" else 1
    return metric, sorted(runs, key=lambda run: sign * run.metrics.get(metric, sign * math.inf))


def table(runs: Sequence[RunRecord], metrics: Sequence[str]) -> list[list[Any]]:
    """Return the table of one or more runs: a row of column names, then one row per run.

    The columns are the folder, relative to the deepest folder that holds all runs; the overrides in
    which the runs differ, without those that name a folder or a checkpoint; `metrics`; those of
    `RunRecord.times` that are at least 0.05 in some run; and the end. A value that is not known is
    None.
    """
    typed = [by_key(run.overrides) for run in runs]
    keys = dict.fromkeys(key for one in typed for key in one if not key.endswith(_LOCATION_KEYS))
    keys = [key for key in keys if len({one.get(key) for one in typed}) > 1]
    names = dict.fromkeys(("steps", "seconds", *(name for run in runs for name in run.times)))
    times = [name for name in names if any(run.times.get(name, 0) >= 0.05 for run in runs)]
    common = os.path.commonpath([os.path.abspath(run.path.parent) for run in runs])
    rows: list[list[Any]] = [["run", *keys, *metrics, *times, "ended"]]
    for run, values_of in zip(runs, typed, strict=True):
        values = *map(values_of.get, keys), *map(run.metrics.get, metrics)
        ending = printable(f"{run.ended}: {run.detail}" if run.detail else run.ended)
        name = printable(os.path.relpath(run.path, common))
        rows.append([name, *values, *map(run.times.get, times), ending])
    return rows


def text_table(runs: Sequence[RunRecord], metric: str) -> str:
    """Return `table` of one or more runs as text, with the objective `metric` as first metric.

    The other metrics are those in SHOWN. Metrics that no run has are left out.
    """
    candidates = dict.fromkeys((metric, *SHOWN))
    rows = table(runs, [name for name in candidates if any(name in run.metrics for run in runs)])
    return align_columns([[name, *map(format_cell, row), end] for name, *row, end in rows])


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of equally many texts as one text, a line per row, in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def format_cell(value: Any) -> str:
    """Return the text of a value for a table. None gives "".

    Numbers of a whole value, and those whose absolute value is 1000 or more, have grouped thousands
    and no decimals. Other numbers have five significant digits. A number must be finite. Any other
    value is its `printable` text, at most 32 characters of it.
    """
    if type(value) not in (int, float):
        return printable("" if value is None else value)[:_CELL]
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.5g}"

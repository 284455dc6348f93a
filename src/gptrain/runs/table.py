"""Comparison of runs: a table with the best run first."""

import math
import os
from collections.abc import Sequence
from typing import Any

from gptrain.core.errors import printable
from gptrain.core.shell import by_key
from gptrain.core.small_files import flatten, read_facts, read_yaml
from gptrain.runs.folder import CONFIG, RunRecord

SHOWN = ("train/loss", "val/loss", "test/loss", "perf/tokens_per_s")  # metrics after the objective
# Endings of keys that hold a location: equal runs may have different ones.
LOCATION_KEYS = ("_dir", "dirpath", "from_run", "ckpt_path")
CELL = 32  # maximum width of a value, in characters; the column `ended` is not cut


def rank_runs(runs: Sequence[RunRecord]) -> tuple[str, list[RunRecord]]:
    """Return the name of the objective, and the runs sorted by it, the best first.

    The last run in `runs` whose config can be read determines the objective and its direction. If
    there is no such run, the objective is val/loss, and the smallest is the best. Runs without the
    metric come last. Runs with equal values keep their order.

    Args:
        runs: Runs in any order.
    """
    configs = (flatten(read_facts(run.path / CONFIG, read_yaml)) for run in reversed(runs))
    config = next(filter(None, configs), {})
    metric = str(config.get("objective", "val/loss"))
    sign = -1 if config.get("checkpoint.mode") == "max" else 1
    return metric, sorted(runs, key=lambda run: sign * run.metrics.get(metric, sign * math.inf))


def table(runs: Sequence[RunRecord], metrics: Sequence[str]) -> list[list[Any]]:
    """Return the table of some runs: a row of column names, then one row per run.

    The columns are the run's name, the overrides in which the runs differ (except for those that
    hold a location), the metrics, steps, seconds, the goodput with the times that are not
    negligible, and how the run ended. A value that a run does not have is None.

    Args:
        runs: Runs in the order of the rows, at least one.
        metrics: Names of the metrics in the order of the columns.
    """
    typed = [by_key(run.overrides) for run in runs]
    keys = dict.fromkeys(key for one in typed for key in one if not key.endswith(LOCATION_KEYS))
    keys = [key for key in keys if len({one.get(key) for one in typed}) > 1]
    names = dict.fromkeys(name for run in runs for name in run.goodput)
    times = [name for name in names if any(run.goodput.get(name, 0) >= 0.05 for run in runs)]
    common = os.path.commonpath([os.path.abspath(run.path.parent) for run in runs])
    rows: list[list[Any]] = [["run", *keys, *metrics, "steps", "seconds", *times, "ended"]]
    for run, values_of in zip(runs, typed, strict=True):
        values = *map(values_of.get, keys), *map(run.metrics.get, metrics), run.steps
        seconds = None if run.seconds is None else round(run.seconds, 1)
        ending = printable(f"{run.ended}: {run.detail}" if run.detail else run.ended)
        name = os.path.relpath(run.path, common)
        rows.append([name, *values, seconds, *map(run.goodput.get, times), ending])
    return rows


def text_table(runs: Sequence[RunRecord], metric: str) -> str:
    """Return the table for a terminal.

    The metrics are the objective, the losses and the speed, as far as any of the runs has them.

    Args:
        runs: Runs in the order of the rows.
        metric: Name of the objective, which is the first metric of the table.
    """
    candidates = dict.fromkeys((metric, *SHOWN))
    rows = table(runs, [name for name in candidates if any(name in run.metrics for run in runs)])
    return align_columns(
        [[printable(name), *map(format_cell, row), end] for name, *row, end in rows]
    )


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of texts as lines whose columns are padded to equal width.

    Args:
        rows: Rows with the same number of cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def format_cell(value: Any) -> str:
    """Return the text of a value in the table of runs.

    An integer, and any number from 1000 on, has no decimals and its thousands are grouped. Other
    numbers have five significant digits. A text is cut at CELL characters, and None is empty.
    """
    if type(value) not in (int, float):
        return printable("" if value is None else value)[:CELL]
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.5g}"

"""Runs in a table: what varied, who is best."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gptrain.core.errors import printable
from gptrain.runs.folder import RunRecord

SHOWN = ("train/loss", "val/loss", "test/loss", "perf/tokens_per_s")  # beside the objective
PLACES = ("_dir", "dirpath", "from_run", "ckpt_path", "checkpoint")  # keys of where, not of what
CELL = 32  # characters of a value; an ending has all it needs
MARK = " *"  # behind the steps of a run
MARKED = (
    "another number of steps than most of these runs: the metrics do not compare like with like"
)
SPELT = {"None": "null", "True": "true", "False": "false"}


def differing(sides: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same in all, but for places."""
    keys = dict.fromkeys(key for side in sides for key in side if not key.endswith(PLACES))
    return [key for key in keys if not all(same(one.get(key), sides[0].get(key)) for one in sides)]


def same(one: Any, other: Any) -> bool:
    """Whether two values are one, however they are spelt: 1e-3 is 0.001, null None."""
    try:
        return float(one) == float(other)
    except (TypeError, ValueError, OverflowError):
        return SPELT.get(str(one), str(one)) == SPELT.get(str(other), str(other))


def ranked(runs: Sequence[RunRecord]) -> tuple[str, list[RunRecord]]:
    """The objective of the last run that began, and the runs by it: the best first."""
    config = next((run.config for run in reversed(runs) if run.config), {})
    metric = str(config.get("objective", "val/loss"))
    sign = -1 if config.get("checkpoint.mode") == "max" else 1
    return metric, sorted(runs, key=lambda run: sign * run.metrics.get(metric, sign * math.inf))


def names(runs: Sequence[RunRecord]) -> list[str]:
    """Each run's folder, without what is common to all."""
    paths = [os.path.abspath(run.path) for run in runs]
    common = os.path.commonpath(map(os.path.dirname, paths))
    return [os.path.relpath(path, common) for path in paths]


def table(runs: Sequence[RunRecord], metrics: Sequence[str]) -> list[list[Any]]:
    """A head and a row a run: its name, what was typed differently, metrics, how it ended."""
    keys = differing([run.typed for run in runs])
    rows: list[list[Any]] = [["run", *keys, *metrics, "steps", "seconds", "ended"]]
    for run, name in zip(runs, names(runs), strict=True):
        values = *map(run.typed.get, keys), *map(run.metrics.get, metrics)
        seconds = None if run.seconds is None else round(run.seconds, 1)
        ending = printable(f"{run.ended}: {run.detail}" if run.detail else run.ended)
        rows.append([name, *values, run.steps, seconds, ending])
    return rows


def text_table(runs: Sequence[RunRecord], metric: str) -> str:
    """Return the table for a terminal, with a mark at runs of another length than most of them."""
    shown = [one for one in dict.fromkeys((metric, *SHOWN)) if any(one in r.metrics for r in runs)]
    head, *rows = table(runs, shown)
    place = head.index("steps")
    is_marked = [steps_differ(run, runs, metric) for run in runs]
    cells = [[printable(name), *map(cell, row), end] for name, *row, end in (head, *rows)]
    for row, marked in zip(cells[1:], is_marked, strict=True):
        row[place] += MARK if marked else ""
    return aligned(cells) + (f"\n{MARK.strip()} {MARKED}" if any(is_marked) else "")


def steps_differ(run: RunRecord, runs: Sequence[RunRecord], metric: str) -> bool:
    """Return whether a run has another number of steps than most of the runs it is ranked with."""
    lengths = Counter(sorted(one.steps for one in runs if metric in one.metrics and one.steps))
    return metric in run.metrics and bool(lengths) and run.steps != lengths.most_common(1)[0][0]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def cell(value: Any) -> str:
    """A number in five digits, thousands in groups; text cut at `CELL` characters."""
    if type(value) not in (int, float):
        return printable("" if value is None else value)[:CELL]
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.5g}"

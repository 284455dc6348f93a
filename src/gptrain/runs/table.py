"""Runs in a table: what varied, who is best."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from typing import Any

from gptrain.runs.folder import RunRecord, read_config

SHOWN = ("train/loss", "val/loss", "test/loss", "perf/tokens_per_s")  # beside the objective
PLACES = {"run_dir", "output_dir", "from_run", "ckpt_path"}  # where, not what
CELL = 32  # characters of a value; an ending has what is left of a line
SPELT = {"None": "null", "True": "true", "False": "false"}


def varied(runs: Sequence[RunRecord]) -> list[str]:
    """Keys that were not typed alike in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.typed if key not in PLACES)
    typed = {key: [run.typed.get(key) for run in runs] for key in keys}
    return [key for key in keys if not all(same(value, typed[key][0]) for value in typed[key])]


def same(one: Any, other: Any) -> bool:
    """Whether two values are one, however they are spelt: 1e-3 is 0.001, None null."""
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return SPELT.get(str(one), str(one)) == SPELT.get(str(other), str(other))


def direction(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """The objective of the newest run, and whether its best is the min or the max."""
    config = read_config(max(runs, key=lambda run: run.started_s).path)
    return str(config.get("objective", "val/loss")), str(config.get("checkpoint.mode", "min"))


def ranked(runs: Sequence[RunRecord], metric: str, mode: str) -> list[RunRecord]:
    """The best first; those without the metric last."""
    sign = -1 if mode == "max" else 1
    return sorted(runs, key=lambda run: sign * run.metrics.get(metric, sign * math.inf))


def names(runs: Sequence[RunRecord]) -> list[str]:
    """Each run's folder, without what is common to all."""
    paths = [os.path.abspath(run.path) for run in runs]
    common = os.path.commonpath(map(os.path.dirname, paths))
    return [os.path.relpath(path, common) for path in paths]


def text_table(runs: Sequence[RunRecord], metric: str, width: int | None = None) -> str:
    """For a terminal of this width."""
    shown = [one for one in dict.fromkeys((metric, *SHOWN)) if any(one in r.metrics for r in runs)]
    rows = [[*map(cell, row[:-1]), row[-1]] for row in _rows(runs, shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    n_left = len(widths) - len(shown) - 2
    form = "  ".join(f"{{:{'<' if i < n_left else '>'}{n}}}" for i, n in enumerate(widths))
    return "\n".join(f"{form}  {{}}".format(*row)[:width].rstrip() for row in rows)


def summary(run: RunRecord, metric: str) -> str:
    """One run on one line."""
    value = f"{metric} {cell(run.metrics[metric])} · " if metric in run.metrics else ""
    return f"{value}{cell(run.steps)} steps in {cell(seconds(run))} s · {ending(run)}"


def csv_table(runs: Sequence[RunRecord]) -> str:
    """For a spreadsheet, with every metric."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(_rows(runs, sorted({name for run in runs for name in run.metrics})))
    return text.getvalue()


def seconds(run: RunRecord) -> float | None:
    """Its duration, as exact as a person reads it."""
    return None if run.seconds is None else round(run.seconds, 1)


def ending(run: RunRecord) -> str:
    """Why it ended."""
    return printable(f"{run.ended}: {run.detail}" if run.detail else run.ended)


def cell(value: Any) -> str:
    """A number in five digits, thousands in groups; text cut at `CELL` characters."""
    if type(value) not in (int, float):
        return printable("" if value is None else value)[:CELL]
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.5g}"


def printable(text: object) -> str:
    """On one line, without a terminal's control characters."""
    return "".join(char if char.isprintable() else " " for char in str(text))


def _rows(runs: Sequence[RunRecord], metrics: Sequence[str]) -> list[list[Any]]:
    keys = varied(runs)
    rows: list[list[Any]] = [["run", *keys, *metrics, "steps", "seconds", "ended"]]
    for run, name in zip(runs, names(runs), strict=True):
        values = *map(run.typed.get, keys), *map(run.metrics.get, metrics)
        rows.append([name, *values, run.steps, seconds(run), ending(run)])
    return rows

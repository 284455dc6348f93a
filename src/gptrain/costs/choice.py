"""A config under every strategy, the best of them, and what to type for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gptrain.core.schema import RunConfig
from gptrain.core.strategies import ANY_NET, STRATEGIES
from gptrain.costs.machine import Machine
from gptrain.costs.shape import find_shape
from gptrain.costs.speed import TIMES, estimate
from gptrain.costs.work import find_work

SELECTIVE, FULL = ({"model.activation_checkpointing": mode} for mode in ("selective", "full"))
LEVELS = ({}, SELECTIVE, FULL, {**FULL, "data.batch_size": 1})  # tried in turn until one fits
EQUAL = 0.98  # of the highest speed: less is no reason for a strategy that does more


def compare(
    run: RunConfig, sample_tokens: int | None, machine: Machine, n_nodes: int
) -> dict[str, Any]:
    """The estimate of each strategy that divides the work, and what is best.

    Args:
        sample_tokens: Positions of a sample of the run's data.

    Returns: {"parameters", "strategies": {name: estimate}, "best": a name, "changes": of keys, for
        the first in the table of strategies of those that fit and are about as fast as the
        fastest}; both None where nothing fits; no strategies without a shape; TIMES are None of a
        machine that was not measured.
    """
    shape, rows = find_shape(run.model), estimates(run, sample_tokens, machine, n_nodes)
    found = {"parameters": shape and shape.n_parameters, "strategies": rows}
    if not machine.is_measured:
        for row in rows.values():
            row |= dict.fromkeys(key for key in TIMES if key in row)
    is_fp16 = str(run.trainer.precision) in ("16-mixed", "16", "16-true")
    is_compiled = run.model.compile == "model"
    allowed = ANY_NET if is_fp16 or is_compiled else STRATEGIES  # by train.py
    for changes in LEVELS:
        tried = estimates(run.changed(changes), sample_tokens, machine, n_nodes).items()
        exact = {name for name in allowed if STRATEGIES[name].is_exact}
        speeds = {k: row["tokens_per_s"] for k, row in tried if row["fits"] and k in exact}
        for name, speed in speeds.items():
            if speed >= EQUAL * max(speeds.values()):
                mine = {"strategy": name} | ({"trainer.devices": 1} if name == "single" else {})
                return found | {"best": name, "changes": mine | changes}
    return found | {"best": None, "changes": None}


def estimates(
    run: RunConfig, sample_tokens: int | None, machine: Machine, n_nodes: int
) -> dict[str, dict[str, Any]]:
    """Those of the strategies that divide the work, by name."""
    rows, world_size = {}, machine.n_local * n_nodes
    for name, strategy in STRATEGIES.items():
        n_ranks, work = world_size if strategy.axes else 1, None
        with suppress(ValueError):  # sizes that do not divide
            if world_size > 1 or name == "single":
                work = find_work(run, sample_tokens, name, n_ranks, machine.is_cpu)
        if work is not None:
            work = replace(work, has_bf16=machine.has_bf16)
            rows[name] = row = estimate(work, machine)
            if tokens := run.max_tokens:
                row["hours"] = tokens / row["tokens_per_s"] / 3600
                row["device_hours"] = row["hours"] * n_ranks
    return rows


def changed_overrides(typed: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """Return the typed overrides with these changes, without the options of another strategy."""
    kept = [word for word in typed if word.partition("=")[0].lstrip("+") not in changes]
    if f"strategy={changes['strategy']}" not in typed:
        kept = [word for word in kept if not word.startswith("strategy.")]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]

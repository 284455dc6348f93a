"""Comparison of all strategies for a run, the best strategy, and the overrides that select it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gptrain.core.precision import find_precision
from gptrain.core.schema import RunConfig
from gptrain.core.strategies import CONTEXT, DATA, STRATEGIES
from gptrain.costs.machine import Machine
from gptrain.costs.shape import find_shape
from gptrain.costs.speed import TIMES, estimate
from gptrain.costs.work import find_work

SELECTIVE = {"model.activation_checkpointing": "selective"}
FULL = {"model.activation_checkpointing": "full"}
# Changes of the config that save memory. `compare` tries them in turn until a strategy fits.
LEVELS = ({}, SELECTIVE, FULL, {**FULL, "data.batch_size": 1})
# A strategy counts as fast as the fastest if it has this fraction of the highest speed. Among such
# strategies the first in the table, which is the simplest, is the best.
EQUAL = 0.98
# Share of the memory of a device that one sequence may take. The estimate of the memory may be 10 %
# too low, and torch's allocator is slow while the memory is nearly full.
ROOM = 0.9


def compare(
    run: RunConfig, sample_tokens: int | None, machine: Machine, n_nodes: int
) -> dict[str, Any]:
    """Estimate the run under each strategy, and choose the best strategy.

    The best strategy is the first in the table of strategies among those that compute the same as
    one process, allow the precision and the `compile` mode of the run, fit into the memory, and are
    about as fast as the fastest. If nothing fits as the run is configured, the changes of `LEVELS`,
    which save memory, are tried in turn. Context parallelism is considered, and then comes first,
    only if strategies that divide nothing but the batch do not fit even with one sequence per rank
    and full activation checkpointing.

    Args:
        run: Configuration of the run.
        sample_tokens: Tokens per sample of the run's data. None if the number is not known.
        machine: Node on which the run trains.
        n_nodes: Number of nodes.

    Returns:
        parameters: Number of parameters, or None if the shape of the net is not known.
        strategies: Estimate (`speed.estimate`) of the run as it is configured, by the name of the
            strategy. A strategy whose ranks do not divide the work is missing. The values of TIMES
            are None if the machine was not measured. Empty if the shape of the net or
            `sample_tokens` is not known.
        best: Name of the best strategy, or None if nothing fits or there are no estimates.
        changes: New values of config keys that select the best strategy and make it fit. None if
            `best` is None.
    """
    shape = find_shape(run.model)
    rows = estimates(run, sample_tokens, machine, n_nodes)
    result = {"parameters": shape and shape.n_parameters, "strategies": rows}
    if not machine.is_measured:
        for row in rows.values():
            row |= dict.fromkeys(key for key in TIMES if key in row)
    is_fp16 = find_precision(run.trainer.precision).is_fp16
    is_compiled = run.model.compile == "model"  # allowed only with strategies that take any net
    exact = [
        name
        for name, row in STRATEGIES.items()
        if (row.is_standard or not is_fp16) and not (is_compiled and row.needs)
    ]
    with_context = [name for name in exact if CONTEXT in STRATEGIES[name].axes]
    names = [name for name in exact if name not in with_context]
    with_room = replace(machine, memory_bytes=ROOM * machine.memory_bytes)
    least = estimates(run.changed(LEVELS[-1]), sample_tokens, with_room, n_nodes)
    on_one_device = [name for name in exact if set(STRATEGIES[name].axes) <= {DATA}]
    if not any(name in least and least[name]["fits"] for name in on_one_device):
        names = with_context + names
    for level in LEVELS:
        level_rows = estimates(run.changed(level), sample_tokens, machine, n_nodes)
        speeds = {
            name: level_rows[name]["tokens_per_s"]
            for name in names
            if name in level_rows and level_rows[name]["fits"]
        }
        for name, speed in speeds.items():
            if speed >= EQUAL * max(speeds.values()):
                changes = {"strategy": name}
                if name == "single":
                    changes["trainer.devices"] = 1
                    if n_nodes > 1:
                        changes["trainer.num_nodes"] = 1
                return result | {"best": name, "changes": changes | level}
    return result | {"best": None, "changes": None}


def estimates(
    run: RunConfig, sample_tokens: int | None, machine: Machine, n_nodes: int
) -> dict[str, dict[str, Any]]:
    """Return the estimate of the run under each strategy whose ranks divide the work, by name.

    `single` uses one device; every other strategy uses all devices and is left out if there is only
    one. If the run has `max_tokens`, the estimates have the entries `hours` and `device_hours`. The
    dict is empty if the shape of the net or `sample_tokens` is not known.

    Args:
        run: Configuration of the run.
        sample_tokens: Tokens per sample of the run's data. None if the number is not known.
        machine: Node on which the run trains.
        n_nodes: Number of nodes.
    """
    rows = {}
    world_size = machine.n_local * n_nodes
    for name, strategy in STRATEGIES.items():
        if world_size == 1 and name != "single":
            continue
        n_ranks = world_size if strategy.axes else 1
        try:
            work = find_work(run, sample_tokens, name, n_ranks, machine.is_cpu)
        except ValueError:  # the numbers of ranks do not divide the work
            continue
        if work is None:
            continue
        row = estimate(replace(work, has_bf16=machine.has_bf16), machine)
        if run.max_tokens:
            row["hours"] = run.max_tokens / row["tokens_per_s"] / 3600
            row["device_hours"] = row["hours"] * n_ranks
        rows[name] = row
    return rows


def changed_overrides(typed: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """Return the typed overrides with changed keys, as words for the command line.

    The typed words of changed keys are removed, and the changes follow at the end. Typed options
    of the strategy, `strategy.<key>=...`, are kept only if the user also typed `strategy=` with the
    new strategy, because they may belong to another one.

    Args:
        typed: Overrides that the user typed.
        changes: New values of config keys. "strategy" is one of the keys.
    """
    kept = [word for word in typed if word.partition("=")[0].lstrip("+") not in changes]
    if f"strategy={changes['strategy']}" not in typed:
        kept = [word for word in kept if not word.startswith("strategy.")]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]

"""A config under every strategy, the best of them, and what to type for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gptrain.plan.dims import ANY_NET, STRATEGIES
from gptrain.plan.shape import find_shape
from gptrain.plan.speed import Machine, estimate
from gptrain.plan.work import find_work

TENSOR_SIZE = "tensor_parallel_size"
SELECTIVE, FULL = ({"model.activation_checkpointing": mode} for mode in ("selective", "full"))
LEVELS = ({}, SELECTIVE, FULL, {**FULL, "data.batch_size": 1})  # tried in turn until one fits


def compare(config: Mapping[str, Any], machine: Machine, n_nodes: int) -> dict[str, Any]:
    """The estimate of each strategy that divides the work, and what is best.

    Args:
        config: checked, as plain values.
    Returns: {"parameters", "strategies": {name: estimate}, "best": a name, "changes": of keys, for
        the fastest that fits}; both None where nothing does; no strategies without a shape.
    """
    shape = find_shape(config["model"])
    rows = {name: row for name, _, row in _estimates(config, machine, n_nodes)}
    found = {"parameters": shape and shape.n_parameters, "strategies": rows}
    for changes in LEVELS:
        changed = _changed(config, changes)
        tried = _estimates(changed, machine, n_nodes, sizes=(2, 4, 8))
        fitting = [one for one in tried if one[2]["fits"] and _is_allowed(config, one[0])]
        if fitting:
            name, options, _ = max(fitting, key=lambda one: one[2]["tokens_per_s"])
            mine = {"strategy": name} | ({"trainer.devices": 1} if name == "single" else {})
            mine |= {f"strategy.{k}": n for k, n in options.items() if k == TENSOR_SIZE and n}
            return found | {"best": name, "changes": mine | changes}
    return found | {"best": None, "changes": None}


def command_line(typed: Sequence[str], changes: Mapping[str, Any]) -> str:
    """What to type for these changes of what was typed; options of another strategy go."""
    kept = [word for word in typed if word.partition("=")[0].lstrip("+") not in changes]
    if f"strategy={changes['strategy']}" not in typed:
        kept = [word for word in kept if not word.startswith("strategy.")]
    return shlex.join(["python", "train.py", *kept, *(f"{k}={v}" for k, v in changes.items())])


def _estimates(
    config: Mapping[str, Any], machine: Machine, n_nodes: int, sizes: Sequence[int] = ()
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, options and estimate of each strategy that divides the work.

    Args:
        sizes: of a tensor group beside data parallelism, besides the given or usual one.
    """
    given, world_size = config["strategy"], machine.n_local * n_nodes
    for name, strategy in STRATEGIES.items():
        is_free = "tensor" in name and len(strategy.axes) == 2 and not given.get(TENSOR_SIZE)
        most = machine.island or machine.n_local
        tries = [given, *({**given, TENSOR_SIZE: n} for n in sizes if is_free and n <= most)]
        for options in tries if world_size > 1 or name == "single" else ():
            n_ranks = world_size if strategy.axes else 1
            try:
                work = find_work(config, name, options, n_ranks, machine.is_cpu)
            except ValueError:
                continue  # sizes that do not divide
            if work is not None:
                row = estimate(work, machine)
                if tokens := config["max_tokens"]:
                    hours = tokens / row["tokens_per_s"] / 3600
                    row |= {"hours": hours, "device_hours": hours * n_ranks}
                yield name, options, row


def _is_allowed(config: Mapping[str, Any], name: str) -> bool:
    """Whether train.py takes this strategy with the config's precision and compilation."""
    is_fp16 = str(config["trainer"]["precision"]) in ("16-mixed", "16", "16-true")
    return name in ANY_NET or not (is_fp16 or config["model"]["compile"] == "model")


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other values of keys of a group."""
    changed = dict(config)
    for (group, _, leaf), value in ((key.partition("."), value) for key, value in changes.items()):
        changed[group] = changed[group] | {leaf: value}
    return changed

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
FULL = {"model.activation_checkpointing": "full"}
# What is tried in turn where nothing fits.
LEVELS = ({}, {"model.activation_checkpointing": "selective"}, FULL, {**FULL, "data.batch_size": 1})


def compare(config: Mapping[str, Any], machine: Machine, n_nodes: int) -> dict[str, Any]:
    """The estimate of each strategy that divides the work, the best, and a command that fits.

    Args:
        config: checked, as plain values.
    Returns: {"parameters", "strategies": {name: estimate}, "best", "command": words that change
        the config, or None where nothing fits}; no strategies where the net has no shape.
    """
    rows = {name: row for name, _, row in _estimates(config, machine, n_nodes, sizes=())}
    shape = find_shape(config["model"])
    found = {
        "parameters": shape and shape.n_parameters,
        "strategies": rows,
        "best": None,
        "command": None,
    }
    for changes in LEVELS:
        changed = _changed(config, changes)
        tried = [*_estimates(changed, machine, n_nodes, sizes=(2, 4, 8))]
        fitting = [one for one in tried if one[2]["fits"] and _is_allowed(config, one[0])]
        if fitting:
            name, options, _ = max(fitting, key=lambda one: one[2]["tokens_per_s"])
            sizes = {f"strategy.{key}": size for key, size in options.items() if key == TENSOR_SIZE}
            found |= {"best": name, "command": {"strategy": name, **sizes, **changes}}
            break
    return found


def command_line(typed: Sequence[str], changes: Mapping[str, Any] | None) -> str | None:
    """The words of `python train.py` with these changes in place of what they replace."""
    if changes is None:
        return None
    keys = {"strategy", *changes}
    kept = [word for word in typed if word.partition("=")[0].lstrip("+") not in keys]
    kept = [word for word in kept if not word.startswith("strategy.")]
    return shlex.join(["python", "train.py", *kept, *(f"{k}={v}" for k, v in changes.items())])


def _estimates(
    config: Mapping[str, Any], machine: Machine, n_nodes: int, sizes: Sequence[int]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, options and estimate of each strategy that divides the work.

    Args:
        sizes: of a tensor group that are tried besides the given or usual one.
    """
    world_size, given = machine.n_local * n_nodes, config["strategy"]
    for name, strategy in STRATEGIES.items():
        if world_size > 1 or name == "single":
            tries = [dict(given)]
            if len(strategy.axes) == 2 and not given.get(TENSOR_SIZE):
                tries += [{**given, TENSOR_SIZE: n} for n in sizes if n <= machine.n_local]
            for options in tries if "tensor" in name else tries[:1]:
                n_ranks = world_size if strategy.axes else 1
                try:
                    work = find_work(config, name, options, n_ranks, machine.is_cpu)
                except ValueError:
                    continue  # does not divide
                if work is not None:
                    yield name, options, estimate(work, machine)


def _is_allowed(config: Mapping[str, Any], name: str) -> bool:
    """Whether train.py takes this strategy with the config's precision and compilation."""
    is_fp16 = str(config["trainer"]["precision"]) in ("16-mixed", "16", "16-true")
    return name in ANY_NET or not (is_fp16 or config["model"]["compile"] == "model")


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other values of some dotted keys of two parts."""
    changed = {
        group: dict(node) if isinstance(node, dict) else node for group, node in config.items()
    }
    for key, value in changes.items():
        group, leaf = key.split(".")
        changed[group][leaf] = value
    return changed

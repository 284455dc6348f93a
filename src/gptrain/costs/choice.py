"""Comparison of all strategies for a run, the best strategy, and the overrides that select it."""

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from gptrain.core.lengths import plan_batch
from gptrain.core.precision import find_precision
from gptrain.core.schema import RunConfig
from gptrain.core.strategies import CONTEXT, DATA, STRATEGIES, options_for, parallel_dims
from gptrain.costs.hardware import Machine
from gptrain.costs.net import net_of
from gptrain.costs.step import Step, estimate, memory

_MODE = "model.activation_checkpointing"
# Changes of the config that save memory. `compare` tries them in turn until a strategy fits.
_LEVELS = ({}, {_MODE: "selective"}, {_MODE: "full"}, {_MODE: "full", "data.batch_size": 1})
# A strategy counts as fast as the fastest if it has this fraction of the highest speed. Among such
# strategies the first in the table, which is the simplest, is the best.
_EQUAL = 0.98
# Share of the memory of a device that one sequence may take. The estimate of the memory may be 10 %
# too low, and torch's allocator is slow while the memory is nearly full.
_ROOM = 0.9
# Values that optimizers of torch store per parameter without momentum, if not two. Adafactor stores
# only one row and one column per matrix.
STATES = {"SGD": 0, "Adafactor": 0, "RMSprop": 1, "Adagrad": 1, "ASGD": 1}


def optimizer_states(target: str, options: Mapping[str, Any]) -> tuple[float, float]:
    """Return how many values an optimizer stores per weight of a block's matrices, and per other.

    The classes of torch.optim and gptrain's Muon are known. Another class may have an attribute
    `states_per_parameter`, for both. Without it, or if the class cannot be imported, it counts as
    Adam: 2 and 2.

    Args:
        target: Dotted path of the class.
        options: Keyword arguments of the class, of which only `momentum` counts.
    """
    n_states: float = 2
    if target == "gptrain.optim.Muon":  # with AdamW for all other parameters
        return 1, 2
    if target.startswith("torch.optim."):
        n_states = STATES.get(target.rpartition(".")[2], 2) + (1 if options.get("momentum") else 0)
    else:
        with suppress(Exception):  # the check of a run reports the error of an import
            n_states = getattr(resolve_name(target), "states_per_parameter", 2)
    return n_states, n_states


def step_of(run: RunConfig, sample_tokens: int | None, name: str, world_size: int) -> Step | None:
    """Return the step of a run under a strategy. None if the net or `sample_tokens` is not known.

    Args:
        run: Configuration of the run. Options of its strategy are kept where the other one has
            them, too. `trainer.num_nodes=auto` counts as one node.
        sample_tokens: Tokens per sample.
        name: Key of STRATEGIES.

    Raises:
        ValueError: If the ranks do not divide the batch, the heads, the blocks or the copies of the
            net.
    """
    model, optimizer, net = run.model, run.optimizer, net_of(run.model)
    if net is None or sample_tokens is None:
        return None
    # "auto" is one node for the planner
    n_nodes = run.trainer.num_nodes if isinstance(run.trainer.num_nodes, int) else 1
    options = options_for(name, run.strategy)
    dims = parallel_dims(options, world_size, n_nodes)
    batch = plan_batch(run, dims.data)
    step = Step(
        net,
        options,
        dims,
        batch.batch_size,
        sample_tokens,
        batch.accumulate,
        precision=str(run.trainer.precision),
        states=optimizer_states(optimizer.target, optimizer.arguments),
        checkpointing=model.activation_checkpointing,
        compile=model.compile,
        dropout=model.arguments.get("dropout") or 0.0,
    )
    remainders = net.n_kv_heads % dims.tensor, net.n_heads % dims.context, dims.data % dims.replicas
    if any(remainders) or step.batch_size % step.microbatches or dims.pipeline > net.n_layers:
        raise ValueError(f"{dims}: does not divide the heads, layers, batch or copies of the model")
    return step


def largest_batch_size(step: Step, machine: Machine) -> int:
    """Return the largest `batch_size` with which a step fits into the memory, or 0 if none does.

    It is a multiple of the microbatches of a pipeline. All other facts are those of `step`, whose
    own `batch_size` does not count.
    """

    def peak(n: int) -> float:
        larger = replace(step, batch_size=n * step.microbatches)
        return max(memory(end)["total"] for end in larger.ends)

    return step.microbatches * bisect_right(range(1, 2**20), machine.memory_bytes, key=peak)


def _estimates(
    run: RunConfig, sample_tokens: int | None, machine: Machine, n_nodes: int
) -> dict[str, dict[str, Any]]:
    """Return the estimate of the run under each strategy whose ranks divide the work, by name."""
    rows = {}
    world_size = machine.n_local * n_nodes
    for name, strategy in STRATEGIES.items():
        try:
            step = step_of(run, sample_tokens, name, world_size if strategy.axes else 1)
        except ValueError:  # the numbers of ranks do not divide the work
            continue
        if step is None or (world_size == 1 and name != "single"):
            continue
        rows[name] = estimate(step, machine)
        rows[name]["largest_batch_size"] = largest_batch_size(step, machine)
    return rows


def compare(
    run: RunConfig, sample_tokens: int | None, machine: Machine, n_nodes: int
) -> dict[str, Any]:
    """Estimate the run under each strategy, and choose the best strategy.

    `single` uses one device, every other strategy all of them. The best strategy is the first in
    the table STRATEGIES among those that allow the precision and the `compile` mode of the run, fit
    into the memory, and reach 98 % of the highest speed. If nothing fits as the run is configured,
    selective and full activation checkpointing, and then full together with `data.batch_size=1`,
    are tried in turn. Context parallelism is considered, and then comes first, only if no strategy
    that divides nothing but the batch fits into 90 % of the memory with the last of these.

    Args:
        sample_tokens: Tokens per sample of the run's data. None if the number is not known.

    Returns:
        parameters: Number of parameters, or None if the net is not known.
        strategies: Name of the strategy -> `estimate` of the run as it is configured, and
            `largest_batch_size`. A strategy whose ranks do not divide the run is missing. Empty if
            the net or `sample_tokens` is not known.
        best: Name of the best strategy, or None if nothing fits or there are no estimates.
        changes: Config key -> new value, for the keys that select the best strategy and make it
            fit. None if `best` is None.
    """
    levels = [_estimates(run.changed(level), sample_tokens, machine, n_nodes) for level in _LEVELS]
    net = net_of(run.model)
    n_parameters = net and int(net.parameters(net.n_layers, True, True))
    result = {"parameters": n_parameters, "strategies": levels[0]}
    rows = STRATEGIES
    # fp16 and the compiled net are allowed only with strategies that take any net.
    if find_precision(run.trainer.precision).is_fp16 or run.model.compile == "model":
        rows = {name: row for name, row in rows.items() if not row.needs}
    room = _ROOM * machine.memory_bytes
    whole = [row for n, row in levels[-1].items() if n in rows and {*rows[n].axes} <= {DATA}]
    fits_whole = any(row["bytes_per_device"]["total"] <= room for row in whole)
    divided = [] if fits_whole else [name for name, row in rows.items() if CONTEXT in row.axes]
    names = divided + [name for name, row in rows.items() if CONTEXT not in row.axes]
    for level, planned in zip(_LEVELS, levels, strict=True):
        fitting = [name for name in names if name in planned and planned[name]["fits"]]
        # Without times, on a CPU, the strategies that use all devices count as equally fast.
        speeds = {n: planned[n]["tokens_per_s"] or (1 if rows[n].axes else 0) for n in fitting}
        equal = (name for name in fitting if speeds[name] >= _EQUAL * max(speeds.values()))
        if best := next(equal, None):
            on_one = {"trainer.devices": 1} if best == "single" else {}
            if best == "single" and n_nodes > 1:
                on_one["trainer.num_nodes"] = 1
            return result | {"best": best, "changes": {"strategy": best} | on_one | level}
    return result | {"best": None, "changes": None}

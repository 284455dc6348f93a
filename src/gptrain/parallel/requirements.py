"""Check that a net has the attributes that an option needs, before any rank starts."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from inspect import signature
from typing import Any, TypeAlias

from torch import nn

from gptrain.core.lengths import BatchPlan
from gptrain.core.strategies import (
    STRATEGIES,
    DDPOptions,
    ParallelDims,
    PipelineOptions,
    StrategyOptions,
    count_microbatches,
    divisors,
    strategy_name,
)

# nn.Module with those optional attributes of `gptrain.models` that the options of a run need, such
# as `blocks`: `check_fit` looks for them.
Net: TypeAlias = Any


class IncompatibleModelError(ValueError):
    """Raised if the net, the module or a callback does not support an option of the config.

    Attributes:
        key: Key of the option, for example "strategy.name".
    """

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key


def check_fit(
    net: nn.Module,
    options: StrategyOptions,
    dims: ParallelDims,
    *,
    compile: str,
    activation_checkpointing: str,
    documents: bool,
) -> None:
    """Check that a net has everything that strategy, compile and checkpointing need.

    Args:
        net: Net, for example on the meta device.
        options: Options of the `strategy` group.
        dims: Number of ranks along each axis.
        compile: "none", "blocks" or "model", the parts of the net that are compiled.
        activation_checkpointing: "none", "selective" or "full", the activations that each block
            recomputes.
        documents: True if samples hold documents that must not see each other.

    Raises:
        IncompatibleModelError: If the net lacks an attribute, or if it cannot be divided over the
            ranks. The message names the first problem only.
    """
    row = STRATEGIES[strategy_name(options.name, dims.world_size)]
    if missing := ", ".join(name for name in row.needs if not hasattr(net, name)):
        message = f"needs {missing} of {type(net).__name__} (see gptrain.models)"
        allowed = [n for n, r in STRATEGIES.items() if all(hasattr(net, need) for need in r.needs)]
        message += f"; strategies that work without: {', '.join(allowed)}"
        raise IncompatibleModelError("strategy.name", message)
    modes = {"model.activation_checkpointing": activation_checkpointing, "model.compile": compile}
    for key, mode in modes.items():
        if mode not in ("none", "model") and not hasattr(net, "blocks"):
            message = f"{mode} needs `blocks` of {type(net).__name__} (see gptrain.models)"
            raise IncompatibleModelError(key, f"{message}; allowed: none")
    if documents:
        check_layout(net)
    check_split(net, dims)


def check_split(net: Net, dims: ParallelDims) -> None:
    """Check that the ranks of a job can divide the heads and the blocks of a net."""
    for axis, n_ranks, names in (
        ("tensor", dims.tensor, ("n_kv_heads", "n_heads")),
        ("context", dims.context, ("n_heads",)),
    ):
        for name in names if n_ranks > 1 else ():
            heads = getattr(net, name, net.n_heads)
            if heads % n_ranks:
                message = f"{n_ranks} ranks do not divide {name}={heads}: a rank has whole heads"
                key = f"strategy.{axis}_parallel_size"
                raise IncompatibleModelError(key, f"{message}; allowed: {divisors(heads)}")
    if dims.context > 1:
        modules = [module for _, module, _ in planned_layers(net, net.context_plan)]
        if not modules or not all(hasattr(module, "exchange") for module in modules):
            message = (
                f"context_plan={net.context_plan} must name modules with an attribute exchange"
            )
            raise IncompatibleModelError("strategy.name", f"{message} (see gptrain.models)")
    if dims.pipeline > 1:
        if dims.pipeline > (n_blocks := len(net.blocks)):
            message = f"{dims.pipeline} stages, but the net has {n_blocks} blocks"
            raise IncompatibleModelError("strategy.pipeline_parallel_size", message)
        tied = tied_names(net)
        owners = [{name.partition(".")[0] for name in names} for names in tied.items()]
        if len(tied) > 1 or any("head" not in names or "blocks" in names for names in owners):
            shared = "; ".join(f"{first} = {second}" for second, first in tied.items())
            message = "a pipeline can share one weight, between embedding and head"
            raise IncompatibleModelError("strategy.name", f"{message}; this net shares {shared}")


def check_batch(options: StrategyOptions, dims: ParallelDims, batch: BatchPlan) -> None:
    """Check that a strategy can divide the batch and the ranks of a step.

    Args:
        options: Options of the `strategy` group.
        dims: Number of ranks along each axis.
        batch: Batch arithmetic of the run.

    Raises:
        IncompatibleModelError: If replicas or microbatches do not divide, or if `static_graph` is
            combined with gradient accumulation.
    """
    if dims.data % dims.replicas:
        message = f"does not divide the {dims.data} data-parallel ranks"
        raise IncompatibleModelError("strategy.replicas", message)
    if isinstance(options, PipelineOptions):
        n_micro = count_microbatches(options.microbatches, dims.pipeline)
        if batch.batch_size % n_micro:
            message = f"not divisible into {n_micro} microbatches"
            raise IncompatibleModelError("data.batch_size", message)
        if options.schedule == "1f1b" and n_micro < dims.pipeline:
            message = f"1f1b needs at least one microbatch per stage ({dims.pipeline})"
            raise IncompatibleModelError("strategy.microbatches", message)
    if batch.accumulate > 1 and isinstance(options, DDPOptions) and options.static_graph:
        message = "torch supports no static graph with gradient accumulation"
        raise IncompatibleModelError("strategy.static_graph", message)


def planned_layers(net: nn.Module, patterns: Iterable[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, layer, pattern) of each layer whose name matches a pattern of fnmatch."""
    for name, layer in net.named_modules():
        for pattern in patterns:
            if fnmatch(name, pattern):
                yield name, layer, pattern
                break


def check_layout(net: nn.Module, n_positions: int = 0) -> None:
    """Check that a net can keep packed documents apart.

    Args:
        net: Net, which is not called.
        n_positions: Number of positions of a sample, which the net itself does not check for packed
            documents. 0 checks the arguments of `forward` only.

    Raises:
        IncompatibleModelError: If `forward` has no argument `layout`, or a sample has more
            positions than the `max_seq_len` of the net, if any.
    """
    if "layout" not in signature(type(net).forward).parameters:
        raise IncompatibleModelError(
            "data.documents",
            f"needs an argument `layout` of {type(net).__name__}.forward (see gptrain.models), by "
            "which attention keeps documents apart; allowed without it: packed",
        )
    if n_positions > (getattr(net, "max_seq_len", None) or n_positions):
        message = f"a sample has {n_positions} positions; try: model.max_seq_len={n_positions}"
        raise IncompatibleModelError("model.max_seq_len", message)


def tied_names(net: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the parameter's first name.

    For example `{"head.weight": "token_embedding.weight"}`. A tied parameter is one nn.Parameter
    that several modules share. The dict is empty without tied parameters.
    """
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[parameter]
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    }

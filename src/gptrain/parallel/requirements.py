"""Check that a net has the attributes that an option needs, before any rank starts."""

from inspect import signature
from typing import Any, TypeAlias

from torch import nn

from gptrain.core.lengths import BatchPlan
from gptrain.core.schema import ModelConfig
from gptrain.core.strategies import (
    STRATEGIES,
    ParallelDims,
    PipelineOptions,
    StrategyOptions,
    count_microbatches,
    strategy_name,
)

# nn.Module with those optional attributes of `gptrain.models` that the options of a run need, such
# as `blocks`: `check_fit` looks for them.
Net: TypeAlias = Any


class IncompatibleModelError(ValueError):
    """Raised if the net, the module or a callback does not support an option of the config.

    Attributes:
        key: Key of the option, such as "strategy.name".
    """

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key


def check_fit(
    net: nn.Module, options: StrategyOptions, dims: ParallelDims, model: ModelConfig
) -> None:
    """Check that a net has everything that a strategy and options of the `model` section need.

    Args:
        net: Full net, with its weights or on the meta device.
        options: `strategy` section of the config.
        dims: Number of ranks along each axis.
        model: `model` section of the config, with the `compile` that the run uses.

    Raises:
        IncompatibleModelError: If the net lacks an attribute, or cannot be divided over the ranks.
            The message names the first problem only.
    """
    row = STRATEGIES[strategy_name(options.name, dims.world_size)]
    if missing := ", ".join(name for name in row.needs if not hasattr(net, name)):
        message = f"needs {missing} of {type(net).__name__} (see gptrain.models)"
        allowed = [n for n, r in STRATEGIES.items() if all(hasattr(net, need) for need in r.needs)]
        hint = f"strategies that work without: {', '.join(allowed)}"
        raise IncompatibleModelError("strategy.name", f"{message}; {hint}")
    for key in ("activation_checkpointing", "compile"):
        if (mode := getattr(model, key)) not in ("none", "model") and not hasattr(net, "blocks"):
            message = f"{mode} needs `blocks` of {type(net).__name__} (see gptrain.models)"
            raise IncompatibleModelError(f"model.{key}", f"{message}; allowed: none")
    _check_split(net, dims)


def _check_split(net: Net, dims: ParallelDims) -> None:
    """Raise an IncompatibleModelError if ranks cannot divide the heads or the blocks of a net."""
    for axis, names in {"tensor": ("n_kv_heads", "n_heads"), "context": ("n_heads",)}.items():
        n_ranks = getattr(dims, axis)
        for name in names if n_ranks > 1 else ():
            heads = getattr(net, name, net.n_heads)
            if heads % n_ranks:
                message = f"{n_ranks} ranks do not divide {name}={heads}: a rank has whole heads"
                key = f"strategy.{axis}_parallel_size"
                allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
                raise IncompatibleModelError(key, f"{message}; allowed: {allowed}")
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
    """Check that the ranks can divide the batch, and that they can hold the copies of the net.

    Raises:
        IncompatibleModelError: If `strategy.replicas` does not divide the data ranks, if a pipeline
            cannot divide the batch of a rank into its microbatches, if it has too few of these for
            the schedule 1f1b, or if a static graph (DDP) is combined with gradient accumulation.
            The message names the first problem only.
    """
    problems = {}
    if dims.data % dims.replicas:
        problems["strategy.replicas"] = f"does not divide the {dims.data} data-parallel ranks"
    if isinstance(options, PipelineOptions):
        n_micro = count_microbatches(options.microbatches, dims.pipeline)
        if batch.batch_size % n_micro:
            problems["data.batch_size"] = f"not divisible into {n_micro} microbatches"
        if options.schedule == "1f1b" and n_micro < dims.pipeline:
            problems["strategy.microbatches"] = f"1f1b needs one for each of {dims.pipeline} stages"
    if batch.accumulate > 1 and getattr(options, "static_graph", False):
        problems["strategy.static_graph"] = "torch has no static graph with gradient accumulation"
    if problems:
        raise IncompatibleModelError(*next(iter(problems.items())))


def check_layout(net: nn.Module, n_positions: int = 0) -> None:
    """Check that a net can keep packed documents apart.

    Args:
        net: Net, partitioned or not.
        n_positions: Number of positions of a sample. 0 leaves out the check of `net.max_seq_len`.

    Raises:
        IncompatibleModelError: If `forward` of the net's class has no argument `layout`, or if
            `n_positions` exceeds `net.max_seq_len`, which the net itself does not check with
            documents.
    """
    if "layout" not in signature(type(net).forward).parameters:
        message = f"needs an argument `layout` of {type(net).__name__}.forward (see gptrain.models)"
        raise IncompatibleModelError("data.documents", f"{message}; allowed without it: packed")
    if n_positions > (getattr(net, "max_seq_len", None) or n_positions):
        message = f"a sample has {n_positions} positions; try: model.max_seq_len={n_positions}"
        raise IncompatibleModelError("model.max_seq_len", message)


def tied_names(net: nn.Module) -> dict[str, str]:
    """Return further name -> first name of the parameters that several modules of a net share.

    The first name is the one in `net.named_parameters()`. An example is `{"head.weight":
    "token_embedding.weight"}`. The dict is empty if no parameter is shared.
    """
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[parameter]
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    }

"""Check that a net has the attributes that an option needs, before any rank starts."""

from collections.abc import Callable
from inspect import signature
from pkgutil import resolve_name

from torch import Tensor, nn

from gptrain.core.strategies import STRATEGIES, ParallelDims, StrategyOptions, strategy_name


class Net(nn.Module):
    """Type, for the type checker only, of a net with all optional attributes of `gptrain.models`.

    No net is an instance of this class. `check_fit` looks for the attributes that the options of a
    run need.

    Attributes:
        blocks: Blocks of the net, in their order.
        embed: Method from tokens (B, T) to the input (B, T, D) of the first block.
        hidden: Method from tokens (B, T) to hidden states (B, T, D) after the final norm.
        norm: Final norm.
        head: Linear layer from hidden states to logits.
        n_heads: Number of attention heads of q.
        tensor_plan: Pattern of layer names -> role of the layers under tensor parallelism.
        context_plan: Patterns of names of modules whose outputs depend on other positions.
    """

    blocks: nn.ModuleList
    embed: Callable[..., Tensor]
    hidden: Callable[..., Tensor]
    norm: nn.Module
    head: nn.Linear
    n_heads: int
    tensor_plan: dict[str, str]
    context_plan: tuple[str, ...]


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
    missing = [name for name in row.needs if not hasattr(net, name)]
    if missing:
        allowed = [
            name
            for name, strategy in STRATEGIES.items()
            if all(hasattr(net, need) for need in strategy.needs)
        ]
        raise IncompatibleModelError(
            "strategy.name",
            f"needs {', '.join(missing)} of {type(net).__name__} (see gptrain.models); strategies "
            f"that work without: {', '.join(allowed)}",
        )
    modes = {"model.activation_checkpointing": activation_checkpointing, "model.compile": compile}
    for key, mode in modes.items():
        if mode not in ("none", "model") and not hasattr(net, "blocks"):
            allowed = "none, model" if key == "model.compile" else "none"
            message = f"{mode} works block by block and needs `blocks` of {type(net).__name__}"
            raise IncompatibleModelError(
                key, f"{message}, an nn.ModuleList (see gptrain.models); without: {allowed}"
            )
    if documents:
        check_layout(net)
    if row.check:
        resolve_name(row.check)(net, options, dims)


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
            "which attention keeps documents apart; without: packed, separate",
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

"""Whether a net has what an option needs; asked of the net alone, before there are any ranks."""

from collections.abc import Callable
from pkgutil import resolve_name

from torch import Tensor, nn

from gptrain.core.strategies import (
    STRATEGIES,
    ParallelDims,
    StrategyOptions,
    strategy_name,
)


class Net(nn.Module):
    """For a type checker: attributes that a net may have (gptrain.models), once it was asked."""

    blocks: nn.ModuleList
    embed: Callable[[Tensor], Tensor]
    hidden: Callable[..., Tensor]
    norm: nn.Module
    head: nn.Linear
    n_heads: int
    tensor_plan: dict[str, str]


class IncompatibleModelError(ValueError):
    """A net that lacks what was asked of it; the one error here that the user can repair.

    Attributes:
        key: the option that asked, as in the config.
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
) -> None:
    """Raises: IncompatibleModelError for the first thing that the net lacks; it may lie on the
    meta device.

    Args:
        options: the `strategy` group.   dims: ranks along each axis.
    """
    row = STRATEGIES[strategy_name(options.name, dims.world_size)]
    if missing := [name for name in row.needs if not hasattr(net, name)]:
        rows = STRATEGIES.items()
        others = [name for name, it in rows if all(hasattr(net, need) for need in it.needs)]
        raise IncompatibleModelError(
            "strategy.name",
            f"needs {', '.join(missing)} of {type(net).__name__} (see gptrain.models); strategies "
            f"that work without: {', '.join(others)}",
        )
    modes = {"model.activation_checkpointing": activation_checkpointing, "model.compile": compile}
    for key, mode in modes.items():
        if mode not in ("none", "model") and not hasattr(net, "blocks"):
            others = "none, model" if key == "model.compile" else "none"
            message = f"{mode} works block by block and needs `blocks` of {type(net).__name__}"
            raise IncompatibleModelError(
                key, f"{message}, an nn.ModuleList (see gptrain.models); without: {others}"
            )
    if row.check:
        resolve_name(row.check)(net, options, dims)


def tied_names(net: nn.Module) -> dict[str, str]:
    """Second name of a parameter that has two -> its first."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[parameter]
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    }

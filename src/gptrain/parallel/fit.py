"""Whether a net has what an option needs; asked of the net alone, before there are any ranks."""

from torch import nn


class Unfit(ValueError):
    """A net that lacks what was asked of it; the one error here that the user can repair.

    Attributes:
        key: the option that asked, as in the config.
    """

    def __init__(self, key: str, wrong: str):
        super().__init__(wrong)
        self.key = key


def check_attributes(net: nn.Module, needed: tuple[str, ...]) -> None:
    """Raises: Unfit with the names of what a strategy needs and the net lacks."""
    missing = [name for name in needed if not hasattr(net, name)]
    if missing:
        what = f"needs {', '.join(missing)}"
        if missing == ["blocks"]:
            what = "works block by block and needs `blocks`, an nn.ModuleList,"
        others = "single, ddp" if needed == ("blocks",) else "single, ddp, and fsdp with `blocks`"
        raise Unfit(
            "strategy.name",
            f"{what} of {type(net).__name__} (see gptrain.models); strategies that work without: "
            f"{others}",
        )


def tied_names(net: nn.Module) -> dict[str, str]:
    """Second name of a parameter that has two -> its first."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[parameter]
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    }


def check_fit(
    net: nn.Module, options, dims, *, compile: str, activation_checkpointing: str
) -> None:
    """Raises: Unfit for the first thing that the net lacks; it may lie on the meta device.

    Args:
        options: the `strategy` group.   dims: ranks along each axis.
    """
    from gptrain.parallel.activation import check_blocks

    name = options.name
    check_blocks(net, "model.activation_checkpointing", activation_checkpointing)
    check_blocks(net, "model.compile", compile)
    if "fsdp" in name:
        check_attributes(net, ("blocks",))
    if "tensor" in name:
        from gptrain.parallel.tensor import check_tensor_parallel

        check_tensor_parallel(net, dims.tensor)
    if "pipeline" in name:
        from gptrain.parallel.pipeline import check_pipeline, count_microbatches

        microbatches = count_microbatches(options, dims)
        check_pipeline(net, dims.pipeline, options.schedule, microbatches)

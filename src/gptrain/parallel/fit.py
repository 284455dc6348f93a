"""What an option needs of a net, asked of the net alone: before there are any ranks."""

from torch import nn

from gptrain.parallel.activation import check_activation_checkpointing, check_compile


def check_fit(
    net: nn.Module, options, split, *, compile: str, activation_checkpointing: str
) -> None:
    """Raises: Unfit for the first thing that the net lacks; it may lie on the meta device.

    Args:
        options: the `strategy` group.   split: the degrees of its axes.
    """
    name = options.name
    check_activation_checkpointing(net, activation_checkpointing)
    check_compile(net, compile)
    if "fsdp" in name:
        from gptrain.parallel.fsdp import check_fsdp

        check_fsdp(net)
    if "tensor" in name:
        from gptrain.parallel.tensor import check_tensor_parallel

        check_tensor_parallel(net, split.tensor)
    if "pipeline" in name:
        from gptrain.parallel.pipeline import check_pipeline, count_microbatches

        microbatches = count_microbatches(options, split)
        check_pipeline(net, split.pipeline, options.schedule, microbatches)

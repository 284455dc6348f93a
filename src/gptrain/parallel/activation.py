"""Apply activation checkpointing and torch.compile to a net. Its parameters keep their names."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
# Matrix multiplications and attention are nearly all of a block's FLOPs. Norms, GELU, dropout and
# sums are limited by memory bandwidth.
_EXPENSIVE = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default] + [
    getattr(_aten, f"_scaled_dot_product_{kind}").default
    for kind in (
        "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"
    )
]  # fmt: skip


def apply_activation_checkpointing(net: nn.Module, mode: str, compile: str = "none") -> None:
    """Make each of `net.blocks` recompute activations in its backward pass, to save memory.

    The losses and the gradients stay the same, also with dropout. Does nothing if mode is "none".

    Args:
        net: Net with an attribute `blocks`. The blocks are changed in place.
        mode: "none" keeps all activations. "full" keeps only the input of a block and runs the
            block twice: least memory, a third more FLOPs. "selective" keeps the outputs of matrix
            multiplications and attention and recomputes the cheap operations between them: hardly
            any additional FLOPs.
        compile: "none", "blocks" or "model". Without torch.compile the recomputation would update
            buffers, such as the averages of BatchNorm, a second time. It therefore works on copies
            of the buffers. The recomputation of compiled code changes no buffers.
    """
    if mode == "none":
        return
    for block in net.get_submodule("blocks").children():
        options = {"use_reentrant": False}
        if compile == "none" and any(True for _ in block.buffers()):
            options["context_fn"] = partial(_contexts_with_buffers, block, mode)
        elif mode == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _EXPENSIVE)
        # Wrapping `forward` instead of the module adds no prefix to parameter names, and module
        # hooks run once.
        block.forward = partial(checkpoint, block.forward, **options)


def _contexts_with_buffers(
    block: nn.Module, mode: str
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return two contexts for a block with buffers: of its forward pass and of its recomputation.

    torch calls this function, as the argument `context_fn` of `checkpoint`, before each forward
    pass. The second context protects the buffers, see `_recomputation`.

    Args:
        block: Block of the net.
        mode: "full" or "selective", as in `apply_activation_checkpointing`.
    """
    if mode == "full":
        return nullcontext(), _recomputation(block, nullcontext())
    forward, recomputation = create_selective_checkpoint_contexts(_EXPENSIVE)
    return forward, _recomputation(block, recomputation)


@contextmanager
def _recomputation(
    block: nn.Module, context: AbstractContextManager
) -> Generator[None, None, None]:
    """Run a block's recomputation with copies of its buffers, and put the buffers back afterwards.

    The recomputation would otherwise update the running averages of BatchNorm a second time. Saving
    the values and restoring them in place would not work: autograd refuses a saved tensor that has
    changed.

    Args:
        block: Block of the net. It has its own buffers again after the context.
        context: Context of torch in which the recomputation runs.
    """
    buffers = [
        (module, name, buffer)
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in buffers:
        setattr(module, name, buffer.clone())
    try:
        with context:
            yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)


def apply_compile(net: nn.Module, mode: str) -> None:
    """Compile the net's forward passes in place. torch compiles them when they are first called.

    Args:
        net: Net that is changed in place.
        mode: "none" compiles nothing. "blocks" compiles one of `net.blocks` and reuses the code for
            all equal blocks, which takes a fraction of the compile time of "model". "model"
            compiles all of `forward` and, if the net has it, `hidden`.
    """
    if mode == "blocks":
        for block in net.get_submodule("blocks").children():
            # FSDP's hooks run around `forward` and are not compiled.
            block.forward = torch.compile(block.forward)
    elif mode == "model":
        for name in ("forward", "hidden"):  # the chunked loss calls `hidden`
            if hasattr(net, name):
                setattr(net, name, torch.compile(getattr(net, name)))

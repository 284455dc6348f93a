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


_SMALL = 2**16  # values of a buffer
_Buffer = tuple[nn.Module, str, torch.Tensor]  # owner, name, values


def apply_activation_checkpointing(net: nn.Module, mode: str, compile: str = "none") -> None:
    """Make each of `net.blocks` recompute activations in its backward pass, to save memory.

    The losses and the gradients stay the same, also with dropout. Does nothing if mode is "none".

    Args:
        net: Net with an attribute `blocks`. The blocks are changed in place.
        mode: "none" keeps all activations. "full" keeps only the input of a block and runs the
            block twice: least memory, a third more FLOPs. "selective" keeps the outputs of matrix
            multiplications and attention and recomputes the cheap operations between them: hardly
            any additional FLOPs.
        compile: "none", "blocks" or "model". Without torch.compile the recomputation would read
            the buffers that the forward pass has changed, such as a counter, and change them a
            second time. It therefore works on copies from before the forward pass. The
            recomputation of compiled code neither reads nor changes the new values.
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
    pass. The recomputation reads the buffers as they were before that forward pass.

    Args:
        block: Block of the net.
        mode: "full" or "selective", as in `apply_activation_checkpointing`.
    """
    contexts = nullcontext(), nullcontext()
    if mode == "selective":
        contexts = create_selective_checkpoint_contexts(_EXPENSIVE)
    forward, recomputation = contexts
    changed: list[_Buffer] = []
    return _keeping_changed(block, changed, forward), _restoring(changed, recomputation)


@contextmanager
def _keeping_changed(
    block: nn.Module, changed: list[_Buffer], context: AbstractContextManager
) -> Generator[None, None, None]:
    """Run a block's forward pass, and put copies of the buffers that it changes into `changed`.

    Copies of small buffers are always kept: F.batch_norm changes its averages without a new
    version.
    """
    buffers = [
        (module, name, buffer, _version(buffer), buffer.clone())
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with context:
        yield
    for module, name, buffer, version, before in buffers:
        is_changed = getattr(module, name) is not buffer or _version(buffer) != version
        if is_changed or buffer.numel() <= _SMALL:
            changed.append((module, name, before))


@contextmanager
def _restoring(
    changed: list[_Buffer], context: AbstractContextManager
) -> Generator[None, None, None]:
    """Run a block's recomputation with the buffers of `changed`, and then put its own back.

    Writing the values into the block's own buffers would not work: autograd refuses a saved tensor
    that has changed.
    """
    own = [(module, name, getattr(module, name)) for module, name, _ in changed]
    for module, name, before in changed:
        setattr(module, name, before)
    try:
        with context:
            yield
    finally:
        for module, name, buffer in own:
            setattr(module, name, buffer)


def _version(tensor: torch.Tensor) -> int:
    """Return the number of changes in place. A tensor of torch.inference_mode allows none."""
    return 0 if tensor.is_inference() else tensor._version


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

"""Apply activation checkpointing and torch.compile to a net. Its parameters keep their names."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gptrain.parallel.requirements import IncompatibleModelError
from gptrain.parallel.tensor import wrap_methods

_aten = torch.ops.aten
# Matrix multiplications and attention are nearly all of a block's FLOPs. Norms, GELU, dropout and
# sums are limited by memory bandwidth.
_EXPENSIVE = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default]
_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_EXPENSIVE += [getattr(_aten, f"_scaled_dot_product_{kernel}").default for kernel in _KERNELS]


def apply_activation_checkpointing(net: nn.Module, mode: str) -> None:
    """Make each of `net.blocks` recompute activations in its backward pass, in place.

    Losses and gradients stay the same, also with dropout.

    Args:
        net: Net with `blocks`, unless the mode is "none".
        mode: "full" keeps only the input of a block, which takes the least memory and a third more
            FLOPs. "selective" also keeps the outputs of matrix multiplications and attention.
            "none" changes nothing.

    Raises:
        IncompatibleModelError: If a block has a batch normalization with running averages.
    """
    if mode == "none":
        return
    blocks = net.get_submodule("blocks")
    if any(isinstance(part, _NormBase) and part.track_running_stats for part in blocks.modules()):
        message = "running averages of batch normalization would change twice in a step"
        raise IncompatibleModelError("model.activation_checkpointing", f"{message}; allowed: none")
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _EXPENSIVE)
    for block in blocks.children():
        # Wrapping `forward` instead of the module adds no prefix to parameter names, and module
        # hooks run once.
        block.forward = partial(checkpoint, block.forward, **options)


def apply_compile(net: nn.Module, mode: str) -> None:
    """Compile a net with torch.compile, in place. The code is generated at the first call.

    Args:
        net: Net, with `blocks` if the mode is "blocks".
        mode: "blocks" compiles `forward` of each block: equal blocks share their code, so this
            takes a fraction of the time of "model", which compiles `net.forward` and, if the net
            has it, `net.hidden`. "none" changes nothing.
    """
    if mode == "blocks":
        for block in net.get_submodule("blocks").children():
            # FSDP's hooks run around `forward` and are not compiled.
            block.forward = torch.compile(block.forward)
    elif mode == "model":
        wrap_methods(net, torch.compile)

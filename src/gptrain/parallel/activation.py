"""What a block keeps for its backward pass, and how it is compiled. Names of parameters stay."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
# Nearly all of a block's FLOPs; the rest (norms, GELU, dropout, sums) is bound by memory.
_EXPENSIVE = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default] + [
    getattr(_aten, f"_scaled_dot_product_{kind}").default
    for kind in (
        "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"
    )
]  # fmt: skip


def apply_activation_checkpointing(net: nn.Module, mode: str) -> None:
    """Make each of net.blocks recompute activations in its backward pass, the same numbers.

    Args:
        mode: "none" keeps everything. "full" keeps a block's input alone and runs it twice: least
            memory, a third more FLOPs. "selective" keeps the outputs of matrix products and of
            attention and recomputes what is cheap between them: no FLOPs worth counting.
    """
    if mode == "none":
        return
    options = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _EXPENSIVE)
    for block in net.get_submodule("blocks").children():
        # The forward, not the module, is wrapped: no prefix in the names, hooks run once.
        block.forward = partial(checkpoint, block.forward, **options)


def apply_compile(net: nn.Module, mode: str) -> None:
    """Compile net's forward passes in place, at their first call.

    Args:
        mode: "none"; "blocks" compiles one block and reuses it for all alike, which is several
            times faster to compile; "model" compiles the whole.
    """
    if mode == "blocks":
        for block in net.get_submodule("blocks").children():
            block.forward = torch.compile(block.forward)  # FSDP's hooks, around it, stay outside
    elif mode == "model":
        for name in ("forward", "hidden"):  # the chunked loss calls the second
            if hasattr(net, name):
                setattr(net, name, torch.compile(getattr(net, name)))

"""Arguments and communication hooks of torch's DistributedDataParallel (DDP).

DDP averages the gradients of full nets over the ranks during the backward pass.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gptrain.core.strategies import DDPOptions, StrategyOptions

# Argument of DistributedDataParallel that broadcasts buffers before each forward pass. torch 2.13
# renamed the argument. GPTStrategy.synchronize_buffers does it once per step.
SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def arguments(options: DDPOptions) -> dict[str, Any]:
    """Return the keyword arguments of DistributedDataParallel for the options of a strategy."""
    keys = DDPOptions.model_fields.keys() - StrategyOptions.model_fields.keys() - {"comm_hook"}
    return {key: getattr(options, key) for key in keys} | {SYNC_BUFFERS: False}


def build_comm_hook(name: str) -> tuple[object, Callable] | None:
    """Build the arguments (state, hook) of DistributedDataParallel.register_comm_hook.

    Args:
        name: Value of `strategy.comm_hook`. "bf16" and "fp16" send half of the bytes and round each
            gradient once. "powersgd" sends factors of rank 1 with error feedback after 1000 steps
            of plain all-reduce, with torch's default options. Source: Vogels et al. 2019,
            arXiv:1905.13727.

    Returns:
        State and hook, or None for "none".
    """
    if name == "none":
        return None
    if name == "powersgd":
        return powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook
    return None, {"bf16": _bf16_compress, "fp16": default_hooks.fp16_compress_hook}[name]


def _bf16_compress(group, bucket):
    """Return the result of torch's bf16_compress_hook, as a hook with another name."""
    return default_hooks.bf16_compress_hook(group, bucket)

"""Data parallelism: DDP keeps full nets and averages their gradients, FSDP2 shards the nets.

Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054 (stage 3); Zhao et al. 2023,
arXiv:2304.11277.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from gptrain.core.precision import find_precision
from gptrain.core.strategies import DDPOptions, ShardedOptions, StrategyOptions
from gptrain.parallel.requirements import Net


def wrap_in_ddp(module: nn.Module, device_ids: Any, options: DDPOptions) -> nn.Module:
    """Wrap a module in DistributedDataParallel, with the options of the strategy. Collective.

    Buffers are not broadcast in forward passes: GPTStrategy.synchronize_buffers does it once per
    step. `device_ids` is an argument of DistributedDataParallel.
    """
    keys = DDPOptions.model_fields.keys() - StrategyOptions.model_fields.keys() - {"comm_hook"}
    model = DistributedDataParallel(module, device_ids, **options.model_dump(include=keys))
    model.broadcast_buffers = False  # torch 2.13 renamed the argument, but not this attribute
    if options.comm_hook == "bf16":
        # torch allows this hook, which it knows by its name, with NCCL only.
        compress = default_hooks.bf16_compress_hook
        model.register_comm_hook(None, lambda group, bucket: compress(group, bucket))
    elif options.comm_hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif options.comm_hook == "powersgd":
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    return model


def apply_fsdp(net: Net, mesh: DeviceMesh, options: ShardedOptions, precision: str) -> None:
    """Shard a net with FSDP2, in place: each of `net.blocks` by itself, then the rest of the net.

    Args:
        net: Net with `blocks`, of plain parameters or of DTensors on the tensor axis.
        mesh: Mesh of `build_shard_mesh`, over which the parameters are sharded.
        options: Options of FSDP2.
        precision: Precision as Lightning names it. With autocast, FSDP2 gathers weights in the type
            of autocast and reduces gradients in fp32. Otherwise both keep the type of the
            parameters.
    """
    # Under bf16-mixed, weights are gathered and multiplied in bf16, and gradients are reduced
    # in fp32. Under any other precision both keep the type of the parameters.
    autocast = find_precision(precision).autocast
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=getattr(torch, autocast) if autocast else None,
        reduce_dtype=torch.float32 if autocast else None,
        cast_forward_inputs=False,
    )
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "shard_placement_fn": lambda parameter: _shard_placement(parameter, mesh),
    }
    if options.cpu_offload:
        arguments["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for block in net.blocks.children():
        # False keeps the gathered parameters until the backward pass (ZeRO-2), which saves one
        # all-gather per block.
        fsdp.fully_shard(block, reshard_after_forward=options.reshard_after_forward, **arguments)
    # The backward pass begins with the parameters that the forward pass used last.
    fsdp.fully_shard(net, reshard_after_forward=False, **arguments)
    if hasattr(net, "hidden"):  # the chunked loss calls net.hidden instead of net.forward
        fsdp.register_fsdp_forward_method(net, "hidden")


def watch_use(net: Any) -> set[str]:
    """Return a set that collects the names of the parameters that get a gradient on this rank.

    Call it once for a net that `apply_fsdp` has sharded, before its first forward pass. Each
    backward pass adds names of `net.named_parameters()`. The caller clears the set after each step.
    """
    # torch 2.11 has no such method
    if reduce_unused := getattr(net, "set_reduce_scatter_unused_params", None):
        reduce_unused(True)
    used = set[str]()
    known = {*net.parameters()}  # the shards

    def watch(*_: Any) -> None:
        """Watch the gathered parameters of a block, and those outside of the blocks."""
        for name, parameter in net.named_parameters():
            if parameter not in known and parameter.requires_grad and torch.is_grad_enabled():
                known.add(parameter)
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.add(name))

    for block in net.blocks.children():
        block.register_forward_pre_hook(watch)  # runs after FSDP's hook
    return used


def _shard_placement(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard | None:
    """Return the dimension in which FSDP2 shards a parameter. None is its default, the rows."""
    if not isinstance(parameter, DTensor) or parameter.ndim == 1:
        return None
    rows_are_sharded = parameter.placements[0].is_shard(0)
    return Shard(1) if rows_are_sharded and parameter.shape[1] % mesh.size() == 0 else None

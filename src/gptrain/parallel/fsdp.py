"""Fully sharded data parallelism: a rank holds 1/N of every parameter, gradient and moment.

A block's parameters are gathered before it runs, forward and backward, and its gradients are
reduce-scattered after. Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054 (stage 3);
Zhao et al. 2023, arXiv:2304.11277.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard


def apply_fsdp(
    net: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> None:
    """Shard each of net.blocks, then what is left, over a mesh of data-parallel ranks.

    A net that is tensor parallel already must have been so on another axis of the same mesh.

    Args:
        mesh: of one axis; or of two, the first over whole copies (HSDP, arXiv:2304.11277, 3.2.2).
        reshard_after_forward: false keeps a block's parameters from forward to backward: one
            all-gather less per step, for the memory of all gathered parameters (ZeRO-2).
        compute_dtype: gathered and multiplied in this type; gradients are reduced in fp32.
        cpu_offload: shards, gradients and the optimizer live in the host's memory.
    """
    # Without a compute_dtype gradients keep their own type.
    reduce_dtype = torch.float32 if compute_dtype is not None else None
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": offload if cpu_offload else OffloadPolicy(),
        "shard_placement_fn": lambda parameter: _axis_free_of_tensor(parameter, mesh),
    }
    for block in net.get_submodule("blocks").children():
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(net, reshard_after_forward=False, **options)  # backward begins where forward ends
    if hasattr(net, "hidden"):  # the chunked loss calls it in place of forward
        register_fsdp_forward_method(net, "hidden")


def reshard(net: nn.Module) -> None:
    """Free gathered weights, which an evaluation leaves in place of the shards."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _axis_free_of_tensor(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard | None:
    # Where the tensor axis shards the rows, FSDP shards the columns if it can do so evenly: two
    # shardings of one dimension interleave, and DTensor cannot express that for an odd vocabulary.
    if not isinstance(parameter, DTensor) or parameter.ndim == 1:
        return None
    rows_are_sharded = parameter.placements[0].is_shard(0)
    return Shard(1) if rows_are_sharded and parameter.shape[1] % mesh.size() == 0 else None

"""A net whose tensors are sharded: by FSDP2, by tensor parallelism, or by both.

Fully sharded, a rank holds 1/N of every parameter, gradient and moment: a block's parameters are
gathered before it runs, forward and backward, and its gradients are reduce-scattered after. Source:
Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054 (stage 3); Zhao et al. 2023, arXiv:2304.11277.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
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
from torch.optim import SGD, Adagrad, Optimizer

from gptrain.core.strategies import ShardedOptions, StrategyOptions
from gptrain.parallel.gradients import sum_gradients
from gptrain.parallel.mesh import build_mesh, build_shard_mesh
from gptrain.parallel.requirements import Net
from gptrain.parallel.strategy import ParallelStrategy
from gptrain.parallel.tensor import (
    apply_tensor_parallel,
    partial_parameters,
    vocab_parallel_loss,
)


class Sharded(ParallelStrategy[StrategyOptions]):
    """Shards of each tensor over the data axis, where the strategy has FSDP2."""

    partitions = True

    def __post_init__(self):
        self.mesh = build_mesh(self.device.type, self.dims)
        self.data_group = self.mesh["data"].get_group()

    def shard(self, net: Net) -> None:
        """By FSDP2 each of net.blocks, then what is left."""
        self.net = net
        if not isinstance(self.options, ShardedOptions):
            return
        mesh = build_shard_mesh(self.mesh, self.dims)
        # Weights gathered and multiplied in bf16, gradients reduced in fp32; or all in their own.
        is_mixed = self.precision == "bf16-mixed"
        dtypes = (torch.bfloat16, torch.float32) if is_mixed else (None, None)
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        shared: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(*dtypes, cast_forward_inputs=False),
            "offload_policy": offload if self.options.cpu_offload else OffloadPolicy(),
            "shard_placement_fn": lambda parameter: _axis_free_of_tensor(parameter, mesh),
        }
        for block in net.blocks.children():
            # False keeps parameters from forward to backward (ZeRO-2): one all-gather less a step.
            fully_shard(block, reshard_after_forward=self.options.reshard_after_forward, **shared)
        # Backward begins where forward ends.
        fully_shard(net, reshard_after_forward=False, **shared)
        if hasattr(net, "hidden"):  # the chunked loss calls it in place of forward
            register_fsdp_forward_method(net, "hidden")

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> None:
        """One kernel over a whole group takes DTensors or tensors, not both, and of Adam alone."""
        super().prepare(module, optimizer)
        beside, has_no_kernel = set(self.beside), isinstance(optimizer, SGD | Adagrad)
        for group in optimizer.param_groups:
            if has_no_kernel and group["fused"]:
                group["fused"] = None  # torch's choice
            if 0 < sum(parameter in beside for parameter in group["params"]) < len(group["params"]):
                group |= {key: False for key in ("foreach", "fused") if key in group}

    @contextmanager
    def without_gradient_sync(self) -> Generator[None, None, None]:
        """Until a step's last micro-step a rank adds up gradients of the whole net.

        With `accumulate_shards` it keeps its shard of them alone: 1/N of the memory, for as many
        times the traffic as a step has micro-steps.
        """
        sums_shards = isinstance(self.options, ShardedOptions) and self.options.accumulate_shards
        waits = isinstance(self.net, FSDPModule) and not sums_shards
        if waits:
            self.net.set_requires_gradient_sync(False)
        yield
        if waits:
            self.net.set_requires_gradient_sync(True)


class TensorParallel(Sharded):
    """Layers split over the tensor axis, inside of FSDP2 where the strategy has both."""

    chunked_loss = staticmethod(vocab_parallel_loss)  # alike on the ranks of a tensor group

    @property
    def slice_group(self) -> dist.ProcessGroup:
        return self.mesh["tensor"].get_group()

    def split(self, net: Net) -> None:
        apply_tensor_parallel(net, self.mesh)

    @cached_property
    def partial(self) -> list[nn.Parameter]:
        """Parameters whose gradients are sums over this rank's slices; a walk, taken once."""
        return partial_parameters(self.net)

    def finish_gradients(self) -> None:
        super().finish_gradients()
        sum_gradients(self.partial, self.slice_group)


def _axis_free_of_tensor(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard | None:
    # Where the tensor axis shards the rows, FSDP shards the columns if it can do so evenly: two
    # shardings of one dimension interleave, and DTensor cannot express that for an odd vocabulary.
    if not isinstance(parameter, DTensor) or parameter.ndim == 1:
        return None
    rows_are_sharded = parameter.placements[0].is_shard(0)
    return Shard(1) if rows_are_sharded and parameter.shape[1] % mesh.size() == 0 else None

"""Sharded parameters: FSDP2, tensor parallelism, or both together.

Under FSDP each of N ranks stores 1/N of every parameter, gradient and optimizer moment. The
parameters of a block are gathered before its forward and its backward pass, and its gradients are
reduce-scattered after the backward pass. Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054
(stage 3); Zhao et al. 2023, arXiv:2304.11277.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

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

from gptrain.core.precision import find_precision
from gptrain.core.strategies import ShardedOptions, StrategyOptions
from gptrain.parallel.gradients import check_use, sum_gradients
from gptrain.parallel.mesh import build_mesh, build_shard_mesh
from gptrain.parallel.requirements import Net
from gptrain.parallel.strategy import OptionsT, ParallelStrategy
from gptrain.parallel.tensor import apply_tensor_parallel, partial_parameters, vocab_parallel_loss


class Sharded(ParallelStrategy[OptionsT]):
    """Shard every parameter over the data axis with FSDP2, if the strategy includes FSDP.

    All ranks must call the constructor, which creates the device meshes.

    Attributes:
        mesh: Device mesh with the axes "pipeline", "data" and "tensor".
        shard_mesh: Device mesh over which FSDP2 shards the parameters.
        net: Net that `shard` was called with.
        used: Names of the parameters of the net that have got a gradient in this step. None if
            they are not recorded.
    """

    is_partitioned = True
    used: set[str] | None = None

    def __post_init__(self):
        self.mesh = build_mesh(self.device.type, self.dims)
        self.shard_mesh = build_shard_mesh(self.mesh, self.dims)
        self.data_group = self.mesh["data"].get_group()

    def shard(self, net: Net) -> None:
        """Apply FSDP2 in place: to each of `net.blocks`, then to the rest of the net.

        Under `strategy=tensor_parallel`, which has no FSDP, it only records the net.
        """
        self.net = net
        if not isinstance(self.options, ShardedOptions):
            return
        mesh = self.shard_mesh
        # Under bf16-mixed, weights are gathered and multiplied in bf16, and gradients are reduced
        # in fp32. Under any other precision both keep the type of the parameters.
        autocast = find_precision(self.precision).autocast
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, autocast) if autocast else None,
            reduce_dtype=torch.float32 if autocast else None,
            cast_forward_inputs=False,
        )
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        arguments: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": policy,
            "offload_policy": offload if self.options.cpu_offload else OffloadPolicy(),
            "shard_placement_fn": lambda parameter: _shard_placement(parameter, mesh),
        }
        reshard = self.options.reshard_after_forward
        for block in net.blocks.children():
            # False keeps the gathered parameters until the backward pass (ZeRO-2), which saves one
            # all-gather per block.
            fully_shard(block, reshard_after_forward=reshard, **arguments)
        # The backward pass begins with the parameters that the forward pass used last.
        fully_shard(net, reshard_after_forward=False, **arguments)
        if hasattr(net, "hidden"):  # the chunked loss calls net.hidden instead of net.forward
            register_fsdp_forward_method(net, "hidden")

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Disable kernels of the optimizer that cannot take sharded parameters, once it is built.

        A multi-tensor kernel accepts DTensors or plain tensors, but not both: a parameter group
        with both gets `foreach=False` and `fused=False`. SGD and Adagrad have no fused kernel for
        DTensors: `fused=True` becomes None, so that torch chooses the implementation. Also records
        `extra_parameters`, the parameters of the module outside `net`, which are not sharded.

        Args:
            module: LightningModule, or any module with an attribute `net`.
            optimizer: Optimizer of the module. Its `param_groups` are changed in place. If it has
                an attribute `replicas`, as Muon has, the attribute is set to the ranks that hold
                the same weights.
        """
        super().prepare(module, optimizer)
        if self.may_skip_parameters and isinstance(self.net, FSDPModule):
            self._watch_use()
        plain_parameters = set(self.extra_parameters)
        has_no_fused_kernel = isinstance(optimizer, SGD | Adagrad)
        for group in optimizer.param_groups:
            if has_no_fused_kernel and group["fused"]:
                group["fused"] = None
            n_plain = sum(parameter in plain_parameters for parameter in group["params"])
            if 0 < n_plain < len(group["params"]):
                group |= {key: False for key in ("foreach", "fused") if key in group}

    def _watch_use(self) -> None:
        """Let `used` record which parameters of the net get a gradient on this rank.

        FSDP2 reduces only the gradients that a rank has. If the ranks had gradients of different
        parameters, it would sum these.
        """
        # torch 2.11 has no such method
        if reduce_unused := getattr(self.net, "set_reduce_scatter_unused_params", None):
            cast(Any, reduce_unused)(True)
        used = self.used = set[str]()
        sharded = {*self.net.parameters()}
        watched: set[nn.Parameter] = set()

        def watch(*_: Any) -> None:
            """Watch the gathered parameters of a block, and those outside of the blocks."""
            for name, parameter in self.net.named_parameters():
                is_new = parameter not in sharded and parameter not in watched
                if is_new and parameter.requires_grad and torch.is_grad_enabled():
                    watched.add(parameter)
                    parameter.register_post_accumulate_grad_hook(
                        lambda _, name=name: used.add(name)
                    )

        for block in self.net.blocks.children():
            block.register_forward_pre_hook(watch)  # runs after FSDP's hook

    def finish_gradients(self) -> None:
        """Complete the gradients once per step, after the last backward pass.

        Averages the gradients of `extra_parameters`, and checks that the data ranks have used the
        same parameters of the net. All ranks must call this method.

        Raises:
            IncompatibleModelError: If they have not, without `strategy.find_unused_parameters`.
        """
        super().finish_gradients()
        group = self.gradient_group
        if self.used is not None and group is not None:
            named = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]
            is_used = [name in self.used for name, _ in named]
            self.used.clear()
            check_use([parameter for _, parameter in named], is_used, group, self.finds_unused)

    @contextmanager
    def without_gradient_sync(self) -> Generator[None, None, None]:
        """Accumulate unsharded gradients inside the block, without communication.

        The block must not contain the last micro-step of a step, whose backward pass
        reduce-scatters the sums. Without FSDP the block changes nothing. With
        `strategy.accumulate_shards` it changes nothing either: the gradients are reduce-scattered
        in every micro-step, and each of N ranks accumulates only its shard, 1/N of the gradients.
        That saves memory, but takes as many reduce-scatters as the step has micro-steps.
        """
        sums_shards = isinstance(self.options, ShardedOptions) and self.options.accumulate_shards
        defers_sync = isinstance(self.net, FSDPModule) and not sums_shards
        if defers_sync:
            self.net.set_requires_gradient_sync(False)
        yield
        if defers_sync:
            self.net.set_requires_gradient_sync(True)


class TensorParallel(Sharded[StrategyOptions]):
    """Split layers over the tensor axis, and shard them with FSDP2 if the strategy includes FSDP.

    Weights are split by columns or rows, and activations by positions of the sequence, as in
    Megatron-LM with sequence parallelism. The net's `tensor_plan` states the role of each layer.
    """

    # The loss is identical on all ranks of a tensor group.
    chunked_loss = staticmethod(vocab_parallel_loss)

    @property
    def activation_group(self) -> dist.ProcessGroup:
        """Ranks that each hold a shard of a module's output: the tensor axis."""
        return self.mesh["tensor"].get_group()

    def split(self, net: Net) -> None:
        """Split the layers in place over the tensor axis, before FSDP.

        `net.tensor_plan` maps patterns of module names to roles, for example "colwise".
        """
        apply_tensor_parallel(net, self.mesh, self.check_length)

    @cached_property
    def partial_parameters(self) -> list[nn.Parameter]:
        """Parameters whose full gradient is the sum of the gradients of all tensor ranks.

        Each rank computes such a gradient from its own shard of the activations.
        """
        return partial_parameters(self.net)

    def finish_gradients(self) -> None:
        """Sum the gradients of `partial_parameters` over the tensor axis, once per step.

        Also averages the gradients of parameters outside `net` over the data ranks. All ranks must
        call this method after the last backward pass of a step.
        """
        super().finish_gradients()
        sum_gradients(self.partial_parameters, self.activation_group)


def _shard_placement(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard | None:
    """Return the dimension in which FSDP2 shards a parameter, or None for its default, the rows.

    If tensor parallelism shards the rows, FSDP shards the columns, provided that they divide
    evenly. Two shardings of one dimension would interleave, which DTensor cannot represent for a
    vocabulary of odd size.

    Args:
        parameter: Parameter after tensor parallelism, if any.
        mesh: Mesh over which FSDP2 shards.
    """
    if not isinstance(parameter, DTensor) or parameter.ndim == 1:
        return None
    rows_are_sharded = parameter.placements[0].is_shard(0)
    return Shard(1) if rows_are_sharded and parameter.shape[1] % mesh.size() == 0 else None

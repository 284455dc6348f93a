"""A net whose tensors are sharded: by FSDP2, by tensor parallelism, or by both."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, Adagrad, Optimizer

from gptrain.parallel.fit import Net
from gptrain.parallel.fsdp import apply_fsdp
from gptrain.parallel.gradients import sum_gradients
from gptrain.parallel.mesh import build_mesh, build_shard_mesh
from gptrain.parallel.tensor import (
    apply_tensor_parallel,
    partial_parameters,
    vocab_parallel_loss,
)
from gptrain.parallel.whole import Whole


class Sharded(Whole):
    """Shards of each tensor over the data axis, where the strategy has FSDP2."""

    partitions = True

    def __post_init__(self):
        self.mesh = build_mesh(self.device.type, self.dims)
        self.data_group = self.mesh["data"].get_group()

    def shard(self, net: Net) -> None:
        self.net = net
        if "fsdp" in self.options.name:
            apply_fsdp(
                net,
                build_shard_mesh(self.mesh, self.dims),
                reshard_after_forward=self.options.reshard_after_forward,
                compute_dtype=torch.bfloat16 if self.precision == "bf16-mixed" else None,
                cpu_offload=self.options.cpu_offload,
            )

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
    def held_back(self) -> Generator[None, None, None]:
        """Until a step's last micro-step a rank adds up gradients of the whole net.

        With `accumulate_shards` it keeps its shard of them alone: 1/N of the memory, for as many
        times the traffic as a step has micro-steps.
        """
        waits = isinstance(self.net, FSDPModule) and not self.options.accumulate_shards
        if waits:
            self.net.set_requires_gradient_sync(False)
        yield
        if waits:
            self.net.set_requires_gradient_sync(True)


class TensorParallel(Sharded):
    """Layers split over the tensor axis, inside of FSDP2 where the strategy has both."""

    chunked_loss = staticmethod(vocab_parallel_loss)  # alike on the ranks of a tensor group

    def split(self, net: Net) -> None:
        apply_tensor_parallel(net, self.mesh)

    @cached_property
    def partial(self) -> list[nn.Parameter]:
        """Parameters whose gradients are sums over this rank's slices; a walk, taken once."""
        return partial_parameters(self.net)

    def finish_gradients(self) -> None:
        super().finish_gradients()
        sum_gradients(self.partial, self.mesh["tensor"].get_group())

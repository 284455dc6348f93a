"""A net that is partitioned over ranks when Lightning meets it: FSDP2, tensor parallelism, both."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Adagrad
from torchmetrics import Metric

from gptrain.lit.losses import LossOptions, has_chunks
from gptrain.lit.strategies.base import BuildArgs, named_beside_net
from gptrain.lit.strategies.data_parallel import Ranks
from gptrain.parallel.fit import Net
from gptrain.parallel.fsdp import apply_fsdp
from gptrain.parallel.gradients import sum_gradients
from gptrain.parallel.mesh import build_mesh, build_shard_mesh
from gptrain.parallel.slices import make_net_on


class MeshStrategy(Ranks):
    """What sharded nets and pipelines have in common: the net is where it is to be.

    Parameters of the module beside its net are whole on every rank; their gradients are averaged
    over the data axis once per step.
    """

    partitions = True

    def setup(self, trainer: pl.Trainer) -> None:
        cast(Accelerator, self.accelerator).setup(trainer)
        self.model = self.precision_plugin.convert_module(cast(pl.LightningModule, self.model))
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        metrics = cast(nn.Module, self.model).get_submodule("metrics")
        for metric in metrics.modules():  # fed alike on all ranks of a data rank
            if isinstance(metric, Metric):
                metric.process_group = self.data_group

    def model_to_device(self) -> None:
        module: Any = self.model
        net = module.net
        module.net = None  # offloaded shards stay where they are
        module.to(self.root_device)
        module.net = net

    def teardown(self) -> None:
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            cast(Accelerator, part).teardown()

    @cached_property
    def beside(self) -> list[nn.Parameter]:
        """Parameters of the module beside its net; a walk through all of it, taken once."""
        return [*named_beside_net(cast(nn.Module, self.lightning_module)).values()]

    def finish_gradients(self) -> None:
        data_group = cast(ProcessGroup, self.data_group)
        sum_gradients(self.beside, data_group, divisor=data_group.size())


class Sharded(MeshStrategy):
    """FSDP2.

    Args:
        syncs_each: reduces gradients at every micro-step: 1/N of the memory of holding them whole
            until the last, for as many times the traffic.
    """

    def __init__(self, mesh: DeviceMesh, *, syncs_each: bool = False):
        super().__init__()
        self.mesh, self.syncs_each = mesh, syncs_each
        self.data_group = mesh["data"].get_group()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """One kernel over a whole group takes DTensors or tensors, not both, and of Adam alone."""
        super().setup_optimizers(trainer)
        beside = set(self.beside)
        has_no_kernel = isinstance(self.optimizers[0], SGD | Adagrad)
        for group in self.optimizers[0].param_groups:
            if has_no_kernel and group["fused"]:
                group["fused"] = None  # torch's choice
            if 0 < sum(parameter in beside for parameter in group["params"]) < len(group["params"]):
                group |= {key: False for key in ("foreach", "fused") if key in group}

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients are added up locally until an optimizer step's last micro-step."""
        switch = None if self.syncs_each else getattr(self.net, "set_requires_gradient_sync", None)
        if switch:
            switch(False)
        yield
        if switch:
            switch(True)


class TensorParallel(Sharded):
    """Tensor parallelism, with or without FSDP2 around it."""

    def loss_sum(
        self, net: nn.Module, tokens: Tensor, targets: Tensor, options: LossOptions
    ) -> Tensor:
        """Alike on the ranks of a tensor group."""
        from gptrain.parallel.vocab_loss import vocab_parallel_loss

        if not has_chunks(net):
            return super().loss_sum(net, tokens, targets, options)
        net = cast(Net, net)
        hidden, weight = net.hidden(tokens), net.head.weight  # (B, T, D), (V, D)
        return vocab_parallel_loss(hidden, weight, targets, reduction="sum", **options.added)

    @torch.no_grad()
    def logits(
        self, net: nn.Module, tokens: Tensor, targets: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        from gptrain.parallel.vocab_loss import vocab_parallel_logits_in_chunks

        if not has_chunks(net):
            return super().logits(net, tokens, targets)
        net = cast(Net, net)
        return vocab_parallel_logits_in_chunks(net.hidden(tokens), net.head.weight, targets)

    @cached_property
    def partial(self) -> list[nn.Parameter]:
        """Parameters whose gradients are sums over this rank's slices; likewise found once."""
        from gptrain.parallel.tensor import partial_parameters

        return partial_parameters(self.net)

    def finish_gradients(self) -> None:
        super().finish_gradients()
        sum_gradients(self.partial, self.mesh["tensor"].get_group())


def build_partitioned(args: BuildArgs) -> tuple[nn.Module, Strategy]:
    """This rank's shards of the net, and the strategy that trains them."""
    options, mesh = args.options, build_mesh(args.device.type, args.dims)
    is_fsdp, is_tensor = "fsdp" in options.name, "tensor" in options.name

    def partition(net: nn.Module) -> None:
        if is_tensor:
            from gptrain.parallel.tensor import apply_tensor_parallel

            apply_tensor_parallel(net, mesh)
        args.finish(net)
        if is_fsdp:
            apply_fsdp(
                net,
                build_shard_mesh(mesh, args.dims),
                reshard_after_forward=options.reshard_after_forward,
                compute_dtype=torch.bfloat16 if args.precision == "bf16-mixed" else None,
                cpu_offload=options.cpu_offload,
            )

    place = "cpu" if is_fsdp and options.cpu_offload else args.device
    strategy = TensorParallel if is_tensor else Sharded
    return make_net_on(place, args.make_net, partition), strategy(
        mesh, syncs_each=is_fsdp and options.accumulate_shards
    )

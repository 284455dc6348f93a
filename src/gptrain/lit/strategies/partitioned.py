"""A net that is partitioned over ranks when Lightning meets it: FSDP2, tensor parallelism, both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from gptrain.lit.losses import LossOptions, has_chunks, whole_net_logits, whole_net_loss
from gptrain.lit.strategies.base import named_beside_net
from gptrain.lit.strategies.data_parallel import Ranks
from gptrain.parallel.fsdp import apply_fsdp
from gptrain.parallel.gradients import clip_grad_norm, sum_gradients
from gptrain.parallel.mesh import build_mesh
from gptrain.parallel.slices import build_partitioned as make_net_on
from gptrain.parallel.tensor import apply_tensor_parallel, partial_parameters
from gptrain.parallel.vocab_loss import vocab_parallel_logits_in_chunks, vocab_parallel_loss
from gptrain.plan import ParallelDims


class MeshStrategy(Ranks):
    """What sharded nets and pipelines have in common: the net is where it is to be.

    Parameters of the module beside its net are whole on every rank; their gradients are averaged
    over the data axis once per step.
    """

    partitions = True
    data_group: dist.ProcessGroup

    def setup(self, trainer: pl.Trainer) -> None:
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        for metric in self.model.modules():
            if isinstance(metric, Metric) and metric in self._fed_metrics():
                metric.process_group = self.data_group

    def model_to_device(self) -> None:
        net, self.model.net = self.model.net, None  # offloaded shards stay where they are
        self.model.to(self.root_device)
        self.model.net = net

    def teardown(self) -> None:
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def measure_and_clip(self, parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
        beside = list(named_beside_net(self.lightning_module).values())
        sum_gradients(beside, self.data_group, divisor=self.data_group.size())
        return self.clip_net(parameters, beside, max_norm)

    def clip_net(
        self, parameters: list[nn.Parameter], beside: list[nn.Parameter], max_norm: float | None
    ) -> Tensor:
        """Norm of all gradients, alike on all ranks; scaled down to max_norm in place."""
        raise NotImplementedError

    def _fed_metrics(self) -> set[Metric]:
        """Metrics that are fed with logits: alike on all ranks but those of the data axis."""
        metrics = getattr(self.model, "metrics", {})
        return {m for metric in metrics.values() for m in metric.modules() if isinstance(m, Metric)}


class Partitioned(MeshStrategy):
    """FSDP2, tensor parallelism, or both.

    Args:
        syncs_each: FSDP reduces gradients at every micro-step: 1/N of the memory of holding them
            whole until the last, for as many times the traffic.
    """

    def __init__(
        self, mesh: DeviceMesh, *, is_fsdp: bool, is_tensor: bool, syncs_each: bool = False
    ):
        super().__init__()
        self.mesh, self.is_fsdp, self.is_tensor = mesh, is_fsdp, is_tensor
        self.syncs_each, self.data_group = syncs_each, mesh["data"].get_group()

    def loss(
        self, net: nn.Module, tokens: Tensor, targets: Tensor, reduction: str, options: LossOptions
    ) -> Tensor:
        """Loss of this rank's samples, alike on the ranks of a tensor group."""
        if not (self.is_tensor and has_chunks(net)):
            return whole_net_loss(net, tokens, targets, reduction, options)
        return vocab_parallel_loss(
            net.hidden(tokens),  # (B, T, D)
            net.head.weight,
            targets,
            reduction=reduction,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
        )

    @torch.no_grad()
    def logits(
        self, net: nn.Module, tokens: Tensor, targets: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if self.is_tensor and has_chunks(net):
            hidden = net.hidden(tokens)
            return vocab_parallel_logits_in_chunks(hidden, net.head.weight, targets)
        return whole_net_logits(net, tokens, targets)

    def clip_net(
        self, parameters: list[nn.Parameter], beside: list[nn.Parameter], max_norm: float | None
    ) -> Tensor:
        if self.is_tensor:
            sum_gradients(partial_parameters(self.net), self.mesh["tensor"].get_group())
        return clip_grad_norm(parameters, max_norm)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients are added up locally until an optimizer step's last micro-step."""
        waits = self.is_fsdp and not self.syncs_each
        if waits:
            self.net.set_requires_gradient_sync(False)
        yield
        if waits:
            self.net.set_requires_gradient_sync(True)


def build_partitioned(
    make_net: Callable[[], nn.Module],
    finish: Callable[[nn.Module], None],
    device: torch.device,
    *,
    options,
    dims: ParallelDims,
    name: str,
    precision: str,
    **_: object,
) -> tuple[nn.Module, Strategy]:
    """This rank's shards of the net, and the strategy that trains them.

    Args:
        options: the `strategy` group.
        precision: Lightning's name; under "bf16-mixed" FSDP gathers weights in bf16.
    """
    mesh = build_mesh(device.type, data=dims.data, tensor=dims.tensor)
    is_fsdp, is_tensor = "fsdp" in name, "tensor" in name

    def partition(net: nn.Module) -> None:
        if is_tensor:
            apply_tensor_parallel(net, mesh)
        finish(net)
        if is_fsdp:
            apply_fsdp(
                net,
                mesh,
                reshard_after_forward=options.reshard_after_forward,
                compute_dtype=torch.bfloat16 if precision == "bf16-mixed" else None,
                cpu_offload=options.cpu_offload,
            )

    offloads = is_fsdp and options.cpu_offload
    net = make_net_on(make_net, partition, "cpu" if offloads else device)
    syncs_each = is_fsdp and options.accumulate_shards
    return net, Partitioned(mesh, is_fsdp=is_fsdp, is_tensor=is_tensor, syncs_each=syncs_each)

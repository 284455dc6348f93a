"""Pipeline parallelism, with or without data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics import Metric

from gptrain.lit.losses import LossOptions
from gptrain.lit.strategies.partitioned import MeshStrategy
from gptrain.loss import (
    chunked_next_token_loss,
    count_targets,
    logits_in_chunks,
    next_token_loss,
    reduce_total,
)
from gptrain.parallel.fit import Unfit
from gptrain.parallel.gradients import clip_grad_norm
from gptrain.parallel.mesh import build_mesh
from gptrain.parallel.pipeline import Pipeline, count_microbatches
from gptrain.parallel.slices import build_partitioned as make_net_on
from gptrain.plan import ParallelDims


class PipelineStrategy(MeshStrategy):
    """A few blocks of the net on every rank.

    Forward and backward passes of a micro-step are one run of the schedule, inside training_step.
    What the loss is then multiplied by could not reach the gradients any more, so that the first
    step makes sure that training_step returns it as it is, alone or in a sum.
    """

    forward_runs_backward = True
    runs_whole_net = False  # no rank can, not even with the others' help

    def __init__(self, pipeline: Pipeline, loss_sum: HeadLoss):
        super().__init__()
        self.pipeline, self.loss_sum = pipeline, loss_sum
        self.aliases, self.stages = pipeline.aliases, pipeline.group
        self.data_group = pipeline.data_group
        self._checks_scale = True

    def loss(
        self, net: nn.Module, tokens: Tensor, targets: Tensor, reduction: str, options: LossOptions
    ) -> Tensor:
        """Loss of this pipeline's samples on all its ranks; in training, gradients besides."""
        self.loss_sum.options = options
        if not torch.is_grad_enabled():
            return reduce_total(self.pipeline.evaluate(tokens, targets), targets, reduction)
        scale = 1 / self.lightning_module.trainer.accumulate_grad_batches
        counted = count_targets(targets)
        total = self.pipeline.forward_backward(tokens, targets, counted, scale)
        anchor = torch.ones((), requires_grad=True, device=total.device)
        return _GradientsExist.apply(anchor, total, scale if self._checks_scale else None)

    def logits(
        self, net: nn.Module, tokens: Tensor, targets: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """On the ranks of the last stage alone; on the others nothing."""
        found: list[tuple[Tensor, Tensor]] = []

        def keep(hidden: Tensor, targets: Tensor) -> None:
            found.append((hidden, targets))

        self.pipeline.evaluate(tokens, targets, on_hidden=keep)
        for hidden, chunk_targets in found:
            yield from logits_in_chunks(hidden, net.head.weight, chunk_targets)

    def share_metric(self, metric: Metric) -> Tensor:
        """Computed where the logits were, sent to the other stages."""
        device = self.root_device
        last = dist.get_global_rank(self.stages, (self.pipeline.n_stages - 1) % self.stages.size())
        value = torch.zeros((), device=device)
        if self.pipeline.has_last:
            value = metric.compute().to(device, torch.float32)
        dist.broadcast(value, last, group=self.stages)
        return value

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Of what is added to the pipeline's loss: its own gradients are there."""
        loss = super().backward(closure_loss, *args, **kwargs)
        self._checks_scale = False
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """With gradients cleared, also where an optimizer evaluates the step once more (SAM)."""
        trainer = self.lightning_module.trainer
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        return super().training_step(*args, **kwargs)

    def clip_net(
        self, parameters: list[nn.Parameter], beside: list[nn.Parameter], max_norm: float | None
    ) -> Tensor:
        """Norm of all gradients over all stages; what lies beside the net is on each of them."""
        self.pipeline.finish_gradients()
        copies = {parameter: 2 for parameter in self.pipeline.tied_parameters()}
        copies |= {parameter: self.stages.size() for parameter in beside}
        return clip_grad_norm(parameters, max_norm, groups=[self.stages], copies=copies)


class HeadLoss:
    """Summed loss of hidden states (b, T, D), on the last stage.

    Attributes:
        options: of the pass that is run: training's, or plain ones in an evaluation.
    """

    options = LossOptions()

    def __init__(self, net: nn.Module, compiles: bool):
        self.net, self.compiles = net, compiles

    def __call__(self, hidden: Tensor, targets: Tensor) -> Tensor:
        head, options = self.net.head, self.options
        added = {"label_smoothing": options.label_smoothing, "z_loss": options.z_loss}
        if head.bias is not None:
            return next_token_loss(head(hidden), targets, reduction="sum", **added)
        return chunked_next_token_loss(
            hidden, head.weight, targets, reduction="sum", compiles=self.compiles, **added
        )


class _GradientsExist(torch.autograd.Function):
    """A loss whose gradients the schedule has formed; `scale` is what they were multiplied by."""

    @staticmethod
    def forward(ctx, anchor, total, scale):
        ctx.scale = scale
        return total.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.scale is not None and abs(float(grad) / ctx.scale - 1) > 1e-3:  # 16 bit losses
            raise Unfit(
                "strategy.name",
                f"training_step multiplies self.loss(...) by {float(grad) / ctx.scale:g}, but a "
                "pipeline has formed its gradients already; return it as it is, or change "
                "optimizer.lr",
            )
        return None, None, None


def build_pipeline(
    make_net: Callable[[], nn.Module],
    finish: Callable[[nn.Module], None],
    device: torch.device,
    *,
    options,
    dims: ParallelDims,
    compiles_loss: bool,
    **_: object,
) -> tuple[nn.Module, Strategy]:
    """This rank's stages of the net, and the strategy that trains them.

    Args:
        options: the `strategy` group.
    """
    mesh = build_mesh(device.type, data=dims.data, pipeline=dims.pipeline)
    made: list[PipelineStrategy] = []

    def partition(net: nn.Module) -> None:
        loss_sum = HeadLoss(net, compiles_loss)
        pipeline = Pipeline(
            net,
            mesh,
            schedule=options.schedule,
            microbatches=count_microbatches(options, dims),
            loss_sum=loss_sum,
        )
        made.append(PipelineStrategy(pipeline, loss_sum))
        finish(net)

    net = make_net_on(make_net, partition, device)
    return net, made[0]

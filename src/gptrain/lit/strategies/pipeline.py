"""Pipeline parallelism, with or without data parallelism."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics import Metric

from gptrain.lit.losses import LossOptions, head_loss
from gptrain.lit.strategies.base import BuildArgs
from gptrain.lit.strategies.partitioned import MeshStrategy
from gptrain.loss import logits_in_chunks
from gptrain.parallel.dims import count_microbatches
from gptrain.parallel.fit import Net, Unfit
from gptrain.parallel.gradients import clip_grad_norm
from gptrain.parallel.mesh import build_mesh
from gptrain.parallel.pipeline import Pipeline
from gptrain.parallel.slices import make_net_on


class PipelineStrategy(MeshStrategy):
    """A few blocks of the net on every rank.

    Forward and backward passes of a micro-step are one run of the schedule, inside training_step.
    What the loss is then multiplied by could not reach the gradients any more, so that the first
    step makes sure that training_step returns it as it is, alone or in a sum.
    """

    forward_runs_backward = True
    runs_whole_net = False  # no rank can, not even with the others' help

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.pipeline, self.stages = pipeline, pipeline.stages
        self.data_group = pipeline.data_group
        self._checks_scale = True

    def loss(
        self,
        net: nn.Module,
        tokens: Tensor,
        targets: Tensor,
        options: LossOptions,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Loss of this pipeline's samples on all its ranks; in training, gradients besides."""

        def loss_sum(hidden: Tensor, targets: Tensor) -> Tensor:
            return head_loss(cast(Net, net).head, hidden, targets, options)

        if divisor is None or not torch.is_grad_enabled():
            total = self.pipeline.evaluate(tokens, targets, loss_sum)
            return total if divisor is None else total / divisor.to(total.dtype)
        scale = 1 / self.trainer.accumulate_grad_batches
        factor = scale / divisor
        total = self.pipeline.train(
            tokens, targets, lambda *given: (loss := loss_sum(*given)) * factor.to(loss.dtype)
        )
        anchor = torch.ones((), requires_grad=True, device=total.device)
        return _GradientsExist.apply(anchor, total / scale, scale if self._checks_scale else None)

    def logits(
        self, net: nn.Module, tokens: Tensor, targets: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """On the ranks of the last stage alone; on the others nothing."""
        found: list[tuple[Tensor, Tensor]] = []

        def keep(hidden: Tensor, targets: Tensor) -> Tensor:
            found.append((hidden, targets))
            return hidden.new_zeros(())

        self.pipeline.evaluate(tokens, targets, keep)
        for hidden, chunk_targets in found:
            yield from logits_in_chunks(hidden, cast(Net, net).head.weight, chunk_targets)

    def share_metric(self, metric: Metric) -> Tensor:
        """Computed where the logits were, sent to the other stages."""
        value = torch.zeros((), device=self.root_device)
        if self.pipeline.rank == self.pipeline.last:
            value = metric.compute().to(self.root_device, torch.float32)
        dist.broadcast(value, group=self.pipeline.group, group_src=self.pipeline.last)
        return value

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Of what is added to the pipeline's loss: its own gradients are there."""
        loss = super().backward(closure_loss, *args, **kwargs)
        self._checks_scale = False
        return loss

    def finish_gradients(self) -> None:
        super().finish_gradients()
        self.pipeline.finish_gradients()

    @cached_property
    def shared(self) -> set[nn.Parameter]:
        """Parameters that several stages hold."""
        return {*self.pipeline.tied_parameters, *self.beside}

    def measure_and_clip(
        self, parameters: list[nn.Parameter], max_norm: float | None, scale: Tensor | None
    ) -> Tensor:
        """Over all stages; of what several of them hold, the first counts."""
        return clip_grad_norm(
            parameters,
            max_norm,
            scale=scale,
            groups=[self.pipeline.group],
            elsewhere=self.shared if self.pipeline.rank else frozenset(),
        )


class _GradientsExist(torch.autograd.Function):
    """A loss whose gradients the schedule has formed; `scale` is what they were multiplied by."""

    @staticmethod
    def forward(ctx, anchor, total, scale):
        ctx.scale = scale
        return total.clone()

    @staticmethod
    def backward(ctx, grad):  # ty: ignore[incompatible-method-override]  # of one output
        if ctx.scale is not None and abs(float(grad) / ctx.scale - 1) > 1e-3:  # 16 bit losses
            raise Unfit(
                "strategy.name",
                f"training_step multiplies self.loss(...) by {float(grad) / ctx.scale:g}, but a "
                "pipeline has formed its gradients already; return it as it is, or change "
                "optimizer.lr",
            )
        return None, None, None


def build_pipeline(args: BuildArgs) -> tuple[nn.Module, Strategy]:
    """This rank's stages of the net, and the strategy that trains them."""
    options, mesh = args.options, build_mesh(args.device.type, args.dims)
    microbatches = count_microbatches(options.microbatches, args.dims.pipeline)
    made: list[PipelineStrategy] = []

    def partition(net: nn.Module) -> None:
        pipeline = Pipeline(net, mesh, schedule=options.schedule, microbatches=microbatches)
        made.append(PipelineStrategy(pipeline))
        args.finish(net)

    net = make_net_on(args.device, args.make_net, partition)
    made[0].replicas = mesh["data"] if args.dims.data > 1 else None
    return net, made[0]

"""A net that is spread over the ranks when Lightning meets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gptrain.lit.strategies.ranks import Ranks
from gptrain.loss import count_targets, reduce_total
from gptrain.parallel.gradients import clip_grad_norm, sum_gradients
from gptrain.parallel.pipeline import Pipeline
from gptrain.parallel.tensor import partial_parameters
from gptrain.parallel.vocab_loss import vocab_parallel_loss


class Spread(Ranks):
    """What sharded and piped nets have in common: shards in checkpoints, and a net left in place.

    `loss` and `clip` take the places of the module's own.
    """

    saves_shards = True

    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        model.loss, model.clip = self.loss, self.clip

    def setup(self, trainer: pl.Trainer) -> None:
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        modules = self.model._modules
        modules["net"], net = None, modules["net"]  # it is where it is to be, offloaded shards too
        self.model.to(self.root_device)
        modules["net"] = net

    def teardown(self) -> None:
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


class Sharded(Spread):
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
        self.syncs_each = syncs_each

    def connect(self, model: pl.LightningModule) -> None:
        self.whole_loss = model.loss
        super().connect(model)

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Loss of this rank's samples, alike on the ranks of a tensor group."""
        if not (self.is_tensor and hasattr(self.net, "hidden")):
            return self.whole_loss(tokens, targets, reduction)
        hidden = self.net.hidden(tokens)  # (B, T, D)
        return vocab_parallel_loss(hidden, self.net.head.weight, targets, reduction=reduction)

    def clip(self, max_norm: float) -> Tensor:
        """Global norm of the gradients, clipped in place."""
        if self.is_tensor:
            sum_gradients(partial_parameters(self.net), self.mesh["tensor"].get_group())
        return clip_grad_norm(self.net.parameters(), max_norm)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients are added up locally until an optimizer step's last micro-step."""
        waits = self.is_fsdp and not self.syncs_each
        if waits:
            self.net.set_requires_gradient_sync(False)
        yield
        if waits:
            self.net.set_requires_gradient_sync(True)


class Piped(Spread):
    """Pipeline parallelism, with or without data parallelism.

    Forward and backward passes of a micro-step are one run of the schedule, inside training_step:
    Lightning's own backward finds nothing to do, and gradients that were cleared just before it
    would be lost: the module clears them after a step.
    """

    runs_whole_net = False  # no rank can, not even with the others' help

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.pipeline = pipeline
        self.aliases, self.stages = pipeline.aliases, pipeline.group

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Loss of this pipeline's samples on all its ranks; in training, gradients besides."""
        if torch.is_grad_enabled():
            scale = 1 / self.lightning_module.trainer.accumulate_grad_batches
            n_counted = count_targets(targets)
            return self.pipeline.forward_backward(tokens, targets, n_counted, scale)
        total = self.pipeline.evaluate(tokens, targets)
        return reduce_total(total, targets, reduction)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing: `loss` has done it."""
        return closure_loss

    def clip(self, max_norm: float) -> Tensor:
        """Global norm of the gradients over all stages, clipped in place."""
        self.pipeline.finish_gradients()
        copies = {parameter: 2 for parameter in self.pipeline.tied_parameters()}
        return clip_grad_norm(self.net.parameters(), max_norm, groups=[self.stages], copies=copies)

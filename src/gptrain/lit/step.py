"""A step of Lightning's loop, without what finds nothing to do in a run of ours.

Lightning 2.6.6 makes 1,800 Python calls in a step that a bare loop does not make, most of them to
ask callbacks, loggers and the profiler for something that is not there; here 470 are left. A step
of 4.2 ms (size=tiny of gptrain.bench, one slow core) then takes 0.6 to 0.8 ms more, in place of
1.45 ms; Accelerate's takes 0.6 to 0.7 ms more.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from gptrain.lit.trainer import NoProfiler

# Hooks that Lightning calls on the module and on every callback in every step; it passes over
# those that are None.
STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class MicroStep(_AutomaticOptimization):
    """Forward and backward of one micro-batch; after the last of a step the optimizer's.

    In the order of Lightning's own and with its hooks, for a `training_step` that returns its loss.
    """

    def run(
        self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The loss (), over the number of micro-steps."""
        trainer, losses = self.trainer, []

        def closure() -> Tensor:
            loss = trainer.strategy.training_step(*kwargs.values())
            if trainer.accumulate_grad_batches > 1:
                loss = loss / trainer.accumulate_grad_batches
            if batch_idx % trainer.accumulate_grad_batches == 0:
                self._on_before_zero_grad(optimizer)
            trainer.strategy.backward(loss, optimizer)
            losses.append(loss.detach())
            return losses[-1]

        if trainer.fit_loop._should_accumulate():
            with _block_parallel_sync_behavior(trainer.strategy):
                closure()
        else:
            self._optimizer_step(batch_idx, closure)
        return {"loss": losses[-1]}


def trim_step(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Leaves out of each micro-step what is found to do nothing in this run.

    Batches here are tuples of tensors, and steps are logged by StepLog: so the signature of
    `training_step` need not be read each time, nor a batch searched for tensors; and results are
    gathered only where something was logged by `self.log`.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    if isinstance(trainer.profiler, NoProfiler):  # profiles tell the parts of Lightning's own
        loop.automatic_optimization = MicroStep(trainer)
    loop._build_kwargs = lambda kwargs, batch, batch_idx: {"batch": batch, "batch_idx": batch_idx}
    should_accumulate = loop._should_accumulate
    loop._should_accumulate = lambda: trainer.accumulate_grad_batches > 1 and should_accumulate()
    loop._should_check_val_epoch = cache(loop._should_check_val_epoch)  # there is one epoch

    def where_logged(method):
        def call() -> None:
            if loop._results or trainer.state.stage is not RunningStage.TRAINING:
                method()

        return call

    connector.on_batch_end = where_logged(connector.on_batch_end)
    connector.update_train_step_metrics = where_logged(connector.update_train_step_metrics)
    trainer.callbacks.append(PassOver())
    transfers = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    if not any(is_overridden(hook, module, pl.LightningModule) for hook in transfers):
        module._on_before_batch_transfer = lambda batch, dataloader_idx=0: batch
        module._apply_batch_transfer_handler = to_device


class PassOver(pl.Callback):
    """Leaves out the calls of step hooks that a part does not override, or no part at all.

    When training starts: until then callbacks may be added.
    """

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        heard = set()
        for part in (module, *trainer.callbacks):
            base = pl.LightningModule if part is module else pl.Callback
            for hook in STEP_HOOKS:
                if is_overridden(hook, part, base):
                    heard.add(hook)
                else:
                    setattr(part, hook, None)

        def clip(module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> None:
            module.configure_gradient_clipping(
                optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )

        precision, loop = trainer.precision_plugin, trainer.fit_loop.epoch_loop
        if "on_before_zero_grad" not in heard:
            loop.automatic_optimization._on_before_zero_grad = lambda _: None
        if "on_before_backward" not in heard and getattr(precision, "scaler", None) is None:
            precision.pre_backward = lambda loss, module: loss
        if "on_after_backward" not in heard:
            precision.post_backward = lambda loss, module: loss
        if "on_before_optimizer_step" not in heard:
            precision._after_closure = clip


def to_device(
    batch: tuple[Tensor, ...], device: torch.device | None = None, dataloader_idx: int = 0
) -> tuple[Tensor, ...]:
    """The batch on the device; from page-locked memory without waiting for the copy."""
    return tuple(part.to(device, non_blocking=True) for part in batch)

"""Stops or skips a step whose loss or gradient is not finite."""

import logging
import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from gptrain.lit.callbacks.vote import gather
from gptrain.lit.module import LanguageModel
from gptrain.resilience.status import NonFinite

log = logging.getLogger(__name__)


class FiniteCheck(Callback):
    """Looks at the norm of the gradients between clipping and the optimizer's step, on every rank.

    The norm is not finite where any gradient of any rank is not, and it is the same on all ranks,
    so that they decide alike without talking. Under 16-mixed the loss scaler meets infinite
    gradients by design and skips those steps itself.

    On a CPU the norm is read at once. On a GPU a read would wait for the device in every step: a
    fused Adam skips the step by itself, told by a flag on the device, and the flag is read here
    before the next step is taken, while the device is busy with that one's gradients.

    Args:
        on_nonfinite: "stop" raises NonFinite, on all ranks; "skip" skips the step.
    """

    def __init__(self, on_nonfinite: str):
        self.on_nonfinite = on_nonfinite
        self._pending: tuple | None = None  # what resolve_pending() reads, and what it is about

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        trainer.strategy.check_finite = self

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Measures the norm of a module that clips in its own way, or not at all."""
        if not clips_by_strategy(trainer, module):
            trainer.strategy.clip(optimizer, None)

    def check(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Looks at the strategy's grad_norm.   Raises: NonFinite, also of the step before."""
        self.resolve_pending()
        if trainer.precision == "16-mixed":
            return
        norm, step = trainer.strategy.grad_norm, trainer.global_step
        losses = trainer.strategy.micro_losses
        if is_read_later(norm, optimizer):
            optimizer.found_inf = norm.isfinite().logical_not().float()
            host = optimizer.found_inf.to("cpu", non_blocking=True)  # into page-locked memory
            copied = torch.cuda.current_stream().record_event() if norm.is_cuda else None
            self._pending = trainer, step, losses, host, copied
        elif not math.isfinite(norm):
            self.skip_or_stop(trainer, step, losses)
            optimizer.zero_grad(set_to_none=True)  # it passes over parameters without a gradient

    def resolve_pending(self) -> None:
        """Reads what is still unread: before a step is logged, validated or saved, and at the end.

        Raises: NonFinite.
        """
        if self._pending is None:
            return
        (trainer, step, losses, host, copied), self._pending = self._pending, None
        if copied is not None:
            copied.synchronize()
        if host.item():
            self.skip_or_stop(trainer, step, losses)

    def skip_or_stop(self, trainer: Trainer, step: int, losses: list[Tensor]) -> None:
        """Says whose loss it was; all ranks must call it.   Raises: NonFinite."""
        values = gather([float(loss) for loss in losses])  # (ranks, micro-steps)
        guilty = (rank for rank, own in enumerate(values) if not all(map(math.isfinite, own)))
        rank = next(guilty, None)
        error = NonFinite(step, rank, trainer.datamodule.step_samples(step, rank))
        if self.on_nonfinite == "stop":
            raise error
        if trainer.is_global_zero:
            log.warning("warning: %s; the step is skipped", error)

    def on_save_checkpoint(self, *_: Any) -> None:
        self.resolve_pending()

    # Another callback may end the run after a step's log line, with a validation or without.
    on_validation_start = on_train_end = on_save_checkpoint


def clips_by_strategy(trainer: Trainer, module: LightningModule) -> bool:
    """Whether Lightning's clipping of this module ends in our strategy's, which measures."""
    if not isinstance(module, LanguageModel) or trainer.gradient_clip_algorithm == "value":
        return False
    return not is_overridden("configure_gradient_clipping", module)


def is_read_later(grad_norm: Tensor, optimizer: Optimizer) -> bool:
    """Whether reading waits for a device, and the optimizer skips a step that it is told to.

    torch's fused SGD takes the flag too, but leaves its momentum uninitialised where it is up at
    the first step (2.13).
    """
    is_adam = isinstance(optimizer, Adam | AdamW)
    return grad_norm.is_cuda and is_adam and all(g["fused"] for g in optimizer.param_groups)

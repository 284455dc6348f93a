"""Lets no step be taken on a loss or a gradient that is not a number."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from gptrain.resilience.ends import NonFinite

log = logging.getLogger(__name__)


def check_finite(module, optimizer: Optimizer, on_nonfinite: str) -> None:
    """Called between clipping and the optimizer's step, on every rank.

    The norm of the gradients is not finite where any gradient of any rank is not, and it is the
    same on all ranks, so they decide alike without talking. Under 16-mixed the loss scaler meets
    infinite gradients by design and leaves those steps out itself.

    Raises:
        NonFinite: on all ranks; unless on_nonfinite is "skip", which leaves the step out.
    """
    trainer = module.trainer
    if trainer.precision == "16-mixed" or torch.isfinite(module.grad_norm):
        return
    losses = gather([float(loss) for loss in module.step_losses])  # (ranks, micro-steps)
    guilty = (rank for rank, own in enumerate(losses) if not torch.tensor(own).isfinite().all())
    step, rank = trainer.global_step, next(guilty, None)
    error = NonFinite(step, rank, trainer.datamodule.step_samples(step, rank))
    if on_nonfinite == "stop":
        raise error
    optimizer.zero_grad(set_to_none=True)  # an optimizer passes over parameters without one
    if trainer.is_global_zero:
        log.warning("warning: %s; the step is left out", error)


def gather(value: Any) -> list[Any]:
    """One value of each rank, on all ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

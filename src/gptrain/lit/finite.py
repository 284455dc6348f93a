"""Lets no step be taken on a loss or a gradient that is not a number."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from gptrain.resilience.status import NonFinite

log = logging.getLogger(__name__)


class FiniteCheck:
    """Called between clipping and the optimizer's step, on every rank.

    The norm of the gradients is not finite where any gradient of any rank is not, and it is the
    same on all ranks, so they decide alike without talking. Under 16-mixed the loss scaler meets
    infinite gradients by design and leaves those steps out itself.

    On a CPU the norm is read at once. On a GPU a read would wait for the device in every step: a
    fused Adam leaves the step out by itself, told by a flag on the device, and the flag is read
    here before the next step is taken, while the device is busy with that one's gradients.

    Args:
        on_nonfinite: "stop" raises NonFinite, on all ranks; "skip" leaves the step out.
    """

    def __init__(self, on_nonfinite: str):
        self.on_nonfinite = on_nonfinite
        self.asked: tuple | None = None  # what settle() reads, and what it is about

    def __call__(self, module, optimizer: Optimizer) -> None:
        """Looks at module.grad_norm.   Raises: NonFinite, also of the step before."""
        self.settle()
        trainer = module.trainer
        if trainer.precision == "16-mixed":
            return
        if is_read_later(module.grad_norm, optimizer):
            step, losses = trainer.global_step, list(module.step_losses)
            optimizer.found_inf = torch.isfinite(module.grad_norm).logical_not().float()
            host = optimizer.found_inf.to("cpu", non_blocking=True)  # into page-locked memory
            copied = None
            if optimizer.found_inf.is_cuda:
                copied = torch.cuda.current_stream().record_event()
            self.asked = trainer, step, losses, host, copied
        elif not math.isfinite(module.grad_norm):
            self.leave_out(trainer, trainer.global_step, module.step_losses)
            optimizer.zero_grad(set_to_none=True)  # it passes over parameters without a gradient

    def settle(self) -> None:
        """Reads what is still unread: before a step is logged, validated, saved, and at the end.

        Raises: NonFinite.
        """
        if self.asked is None:
            return
        (trainer, step, losses, host, copied), self.asked = self.asked, None
        if copied is not None:
            copied.synchronize()
        if host.item():
            self.leave_out(trainer, step, losses)

    def leave_out(self, trainer, step: int, losses: list[Tensor]) -> None:
        """Tells whose loss it was; all ranks must call it."""
        values = gather([float(loss) for loss in losses])  # (ranks, micro-steps)
        guilty = (rank for rank, own in enumerate(values) if not torch.tensor(own).isfinite().all())
        rank = next(guilty, None)
        error = NonFinite(step, rank, trainer.datamodule.step_samples(step, rank))
        if self.on_nonfinite == "stop":
            raise error
        if trainer.is_global_zero:
            log.warning("warning: %s; the step is left out", error)


def is_read_later(grad_norm: Tensor, optimizer: Optimizer) -> bool:
    """Whether reading waits for a device, and the optimizer leaves out a step that it is told to.

    torch's fused SGD takes the flag too, but leaves its momentum uninitialised where it is up at
    the first step (2.13).
    """
    return grad_norm.is_cuda and is_fused_adam(optimizer)


def is_fused_adam(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return isinstance(optimizer, Adam | AdamW) and all(group["fused"] for group in groups)


def gather(value: Any) -> list[Any]:
    """One value of each rank, on all ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

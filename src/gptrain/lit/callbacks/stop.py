"""Ends a run that was asked to stop: all ranks at the same step, saved, with nothing lost."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.module import LanguageModel
from gptrain.resilience.ends import Preempted
from gptrain.resilience.signals import StopFlag


class StopAtStep(Callback):
    """Asks all ranks at every step whether any of them was told to stop.

    The question of one step is answered at the next, so that no rank waits for it.

    Args:
        flag: set by the signal handlers of this process.
        checkpoints: what saves the run; None where nothing is kept.
    """

    def __init__(self, flag: StopFlag, checkpoints: Checkpoints | None):
        self.flag, self.checkpoints = flag, checkpoints
        self.asked: tuple[torch.Tensor, dist.Work] | None = None

    def on_train_batch_end(
        self, trainer: Trainer, module: LanguageModel, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.fit_loop._should_accumulate() and self._all_stop(module.device):
            self._leave(trainer)

    def on_validation_batch_end(self, trainer: Trainer, module: LanguageModel, *_: Any) -> None:
        if trainer.state.fn == "fit" and self._all_stop(module.device):
            self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(trainer)
        raise Preempted(trainer.global_step)

    def _all_stop(self, device: torch.device) -> bool:
        if not dist.is_initialized():
            return self.flag.is_set()
        stop = False
        if self.asked is not None:
            told, work = self.asked
            work.wait()
            stop = bool(told.item())
        told = torch.tensor([self.flag.is_set()], dtype=torch.uint8, device=device)
        self.asked = told, dist.all_reduce(told, op=dist.ReduceOp.MAX, async_op=True)
        return stop

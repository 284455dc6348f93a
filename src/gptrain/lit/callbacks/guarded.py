"""Tells the watchers that the run gets on, and ends it where it was asked to stop."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.module import LanguageModel
from gptrain.resilience.ends import Preempted
from gptrain.resilience.guard import Guard


class Guarded(Callback):
    """Beats at every batch; and asks all ranks whether any of them was told to stop.

    All ranks leave at the same step, saved. The question of one step is answered at the next, so
    that no rank waits for the answer.

    Args:
        guard: of this rank.
        checkpoints: what saves the run; None where nothing is kept.
    """

    def __init__(self, guard: Guard, checkpoints: Checkpoints | None):
        self.guard, self.checkpoints = guard, checkpoints
        self.asked: tuple[torch.Tensor, dist.Work] | None = None

    def on_train_start(self, trainer: Trainer, module: LanguageModel) -> None:
        self.guard.heartbeat.beat(step=trainer.global_step, phase="train")

    def on_train_batch_end(
        self, trainer: Trainer, module: LanguageModel, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.guard.heartbeat.beat(step=trainer.global_step, phase="train")
        if not trainer.fit_loop._should_accumulate():
            self._leave_if_asked(trainer, module)

    def on_validation_batch_end(self, trainer: Trainer, module: LanguageModel, *_: Any) -> None:
        self.guard.heartbeat.beat(phase="validate")
        if trainer.state.fn == "fit":
            self._leave_if_asked(trainer, module)

    def on_test_batch_end(self, trainer: Trainer, module: LanguageModel, *_: Any) -> None:
        self.guard.heartbeat.beat(phase="test")

    def on_train_end(self, trainer: Trainer, module: LanguageModel) -> None:
        self.guard.heartbeat.beat(phase="end")
        if self.asked is not None:
            self.asked[1].wait()  # nobody leaves a collective behind

    def _leave_if_asked(self, trainer: Trainer, module: LanguageModel) -> None:
        if self._all_stop(module.device):
            if self.checkpoints is not None:
                self.checkpoints.save(trainer)
            raise Preempted(trainer.global_step)

    def _all_stop(self, device: torch.device) -> bool:
        if not dist.is_initialized():
            return bool(self.guard.stop)
        stop = False
        if self.asked is not None:
            told, work = self.asked
            work.wait()
            stop = bool(told.item())
        told = torch.tensor([bool(self.guard.stop)], dtype=torch.uint8, device=device)
        self.asked = told, dist.all_reduce(told, op=dist.ReduceOp.MAX, async_op=True)
        return stop

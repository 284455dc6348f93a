"""Keeps Python's garbage collector off the steps."""

from __future__ import annotations

import gc
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gptrain.lit.lightning import ends_step


class CollectGarbage(Callback):
    """Collects every `every_n_steps` and after validations only, on all ranks at the same step.

    Left alone, the collector stops a rank at times of its own, each time for as long as it takes
    to look at all objects of all imported packages, and under DDP every other rank waits for it.

    Args:
        every_n_steps: optimizer steps between two collections; steps leave few cycles behind.
    """

    def __init__(self, every_n_steps: int = 100):
        self.every_n_steps = every_n_steps
        self.was_enabled = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.was_enabled = gc.isenabled()
        gc.collect(1)  # without the oldest: that takes 0.2 s, most of it for imported packages
        gc.freeze()  # what exists now stays; collections look at newer objects only
        gc.disable()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not ends_step(trainer, batch_idx):
            return
        if trainer.global_step % self.every_n_steps == 0:
            gc.collect()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not gc.isenabled():
            gc.collect()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._leave_as_found()

    def on_exception(
        self, trainer: Trainer, module: LightningModule, exception: BaseException
    ) -> None:
        self._leave_as_found()

    def _leave_as_found(self) -> None:
        gc.unfreeze()
        if self.was_enabled:
            gc.enable()

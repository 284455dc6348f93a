"""Tells the loggers where a run goes on."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer


class Curves(Callback):
    """Hands the first step to each logger that has a `go_on_from`."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for logger in trainer.loggers:
            if hasattr(logger, "go_on_from"):
                logger.go_on_from(trainer.global_step)

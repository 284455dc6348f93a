"""One bar for the whole run, counted in optimizer steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """Lightning's bar with the last logged loss beside it, and no epoch: a run is one pass."""

    def on_train_epoch_start(self, trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description("train")

    def get_metrics(self, trainer, pl_module) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if "train/loss" in pl_module.logged:
            metrics["train/loss"] = f"{pl_module.logged['train/loss']:.3f}"
        return metrics

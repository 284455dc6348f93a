"""One bar for the whole run, counted in batches, with the last logged loss beside it."""

from __future__ import annotations

import sys
import threading
from typing import Any

from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm import tqdm

LINES_IN_A_FILE = 20  # of the bar, where the output is no terminal


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, without its epochs: a run is one pass."""

    def __init__(self):
        super().__init__()
        tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore that a killed rank leaks

    def on_train_start(self, trainer, *_: Any) -> None:
        if not sys.stderr.isatty():
            self._refresh_rate = max(1, int(trainer.num_training_batches) // LINES_IN_A_FILE)
        super().on_train_start(trainer)

    def on_train_epoch_start(self, trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description("train")

    def on_exception(self, *_: Any) -> None:
        """Ends the bar's line: what is told of an end that comes early begins another."""
        for bar in (self._val_progress_bar, self._train_progress_bar):
            if bar is not None:
                bar.close()

    def get_metrics(self, trainer, pl_module) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if "train/loss" in pl_module.logged:
            metrics["train/loss"] = f"{pl_module.logged['train/loss'][1]:.3f}"
        return metrics

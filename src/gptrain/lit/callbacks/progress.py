"""Lightning's progress bar, quiet in files, over what the run takes of each epoch."""

from __future__ import annotations

import sys
import threading
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from tqdm import tqdm

LINES_IN_A_FILE = 20  # of the bar, where the output is no terminal


class ProgressBar(TQDMProgressBar):
    """Redrawn at every micro-batch in a terminal, twenty times an epoch elsewhere.

    Args:
        n_batches: micro-batches of an epoch, or of a run that is shorter.

    Attributes:
        loss: of the last step that was logged; read from its device once.
    """

    loss: Tensor | float | None = None

    def __init__(self, n_batches: int):
        rate = 1 if sys.stdout.isatty() else max(1, n_batches // LINES_IN_A_FILE)
        super().__init__(refresh_rate=rate)
        tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore that a killed rank leaks

    @property
    def total_train_batches(self) -> int | float:
        """Micro-batches of this epoch, or where the run ends within it."""
        trainer, of_epoch = self.trainer, super().total_train_batches
        if trainer.max_steps < 0:
            return of_epoch
        of_run = trainer.max_steps * trainer.accumulate_grad_batches
        return min(of_epoch, of_run - trainer.current_epoch * of_epoch)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_start()
        self.on_train_epoch_start(trainer)  # Lightning does not of a run resumed within an epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the last count, also of a run that stops early."""
        self.train_progress_bar.n = trainer.fit_loop.batch_idx + 1
        super().on_train_epoch_end(trainer, pl_module)

    def end_line(self) -> None:
        """Ends the bar, and its line: what is said next begins another."""
        if self._train_progress_bar is not None:
            self.train_progress_bar.close()

    def on_exception(self, *_: Any) -> None:
        """Of an end that comes early, too."""
        self.end_line()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        if self.loss is None:
            return metrics
        self.loss = float(self.loss)
        return {"train/loss": self.loss, **metrics}

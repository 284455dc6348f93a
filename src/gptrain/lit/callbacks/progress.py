"""Lightning's progress bar, quiet in files."""

from __future__ import annotations

import sys
import threading
from typing import Any

from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from tqdm import tqdm

LINES_IN_A_FILE = 20  # of the bar, where the output is no terminal


class ProgressBar(TQDMProgressBar):
    """Redrawn at every step in a terminal, twenty times an epoch elsewhere.

    Args:
        epoch_batches: micro-batches of an epoch.

    Attributes:
        loss: of the last step that was logged; read from its device once.
    """

    loss: Tensor | float | None = None

    def __init__(self, epoch_batches: int):
        rate = 1 if sys.stderr.isatty() else max(1, epoch_batches // LINES_IN_A_FILE)
        super().__init__(refresh_rate=rate)
        tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore that a killed rank leaks

    def on_exception(self, *_: Any) -> None:
        """Ends the bar's line: what is said of an end that comes early begins another."""
        if self._train_progress_bar is not None:
            self.train_progress_bar.close()

    def get_metrics(self, trainer, pl_module) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if self.loss is None:
            return metrics
        self.loss = float(self.loss)
        return {"train/loss": self.loss, **metrics}

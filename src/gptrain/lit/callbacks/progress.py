"""The progress bar: a tqdm bar in a terminal, and a few printed lines if output goes to a file."""

import logging
import sys
import threading
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from tqdm import tqdm

from gptrain.core import labels

log = logging.getLogger(__name__)
LINES_PER_EPOCH = 20  # highest number of printed lines if the output is not a terminal


class ProgressBar(TQDMProgressBar):
    """Lightning's tqdm bar, whose length is the number of micro-batches that the run uses.

    In a terminal the bar is redrawn at every micro-batch. If the output is not a terminal, at
    most 20 lines per epoch are printed instead, each only if a value was logged since the last.

    Attributes:
        logged: Name -> value of the last logged step, set by `TrainingMonitor`. A loss that is a
            tensor is replaced by its text when it is first shown.
        printed: Values of the last printed line.
    """

    def __init__(self):
        self.in_terminal = sys.stdout.isatty()
        self.logged: dict[str, Any] = {}
        self.printed: dict[str, Any] = {}
        super().__init__(refresh_rate=1)
        if not self.in_terminal:
            self.disable()
        # The default lock of tqdm is a multiprocessing semaphore, which a killed rank would leak.
        tqdm.set_lock(threading.RLock())

    @property
    def total_train_batches(self) -> int | float:
        """Number of micro-batches of this epoch, fewer if the run ends within the epoch."""
        trainer = self.trainer
        epoch_batches = trainer.num_training_batches
        if trainer.max_steps < 0:
            return epoch_batches
        run_batches = trainer.max_steps * trainer.accumulate_grad_batches
        remaining = run_batches - trainer.current_epoch * epoch_batches
        # If the length of an epoch is unknown, all batches of the run count in each epoch.
        return min(epoch_batches, remaining) if remaining > 0 else run_batches

    def on_train_start(self, *args: Any) -> None:
        """Start the bar of the epoch, also for a run that resumes within an epoch."""
        super().on_train_start(*args)
        self.on_train_epoch_start(*args)  # Lightning skips this hook when it resumes in an epoch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the bar, or print a line if one is due and the output is not a terminal."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.in_terminal:
            return
        n_done = batch_idx + 1
        total = self.total_train_batches
        interval = max(1, -(-total // LINES_PER_EPOCH))  # rounded up
        if n_done == total or n_done % interval == 0:
            metrics = self.get_metrics(trainer, pl_module)
            if metrics == self.printed:  # no value was logged since the last printed line
                return
            self.printed = metrics
            words = [f"{n_done}/{total}", *(f"{name} {value}" for name, value in metrics.items())]
            log.info(labels.line(f"epoch {trainer.current_epoch}", " · ".join(words)))

    def end_line(self) -> None:
        """Close the training bar, so that the next printed text begins on a new line."""
        if self._train_progress_bar is not None:
            self.train_progress_bar.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close the bar, so that the error message begins on a new line."""
        self.end_line()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return name -> value of the bar: the last logged step and Lightning's own metrics."""
        if isinstance(loss := self.logged.get("train/loss"), Tensor):
            self.logged["train/loss"] = f"{float(loss):.4f}"
        return {**self.logged, **super().get_metrics(trainer, pl_module)}

"""Lightning's progress bar over what the run takes of each epoch; in a file a line now and then."""

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
LINES_IN_A_FILE = 20  # of an epoch, where the output is no terminal


class ProgressBar(TQDMProgressBar):
    """A bar that is redrawn at every micro-batch in a terminal; elsewhere lines.

    Of an epoch at most twenty lines are printed, and only where a value was logged since the last.

    Attributes:
        logged: name -> what is shown of the last step that was logged; a loss that is still a
            tensor is read from its device once.
        printed: Values of the last line in a file.
    """

    def __init__(self):
        self.in_terminal = sys.stdout.isatty()
        self.logged: dict[str, Any] = {}
        self.printed: dict[str, Any] = {}
        super().__init__(refresh_rate=1)
        if not self.in_terminal:
            self.disable()
        tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore that a killed rank leaks

    @property
    def total_train_batches(self) -> int | float:
        """Micro-batches of this epoch, or where the run ends within it."""
        trainer, of_epoch = self.trainer, super().total_train_batches
        if trainer.max_steps < 0:
            return of_epoch
        of_run = trainer.max_steps * trainer.accumulate_grad_batches
        return min(of_epoch, of_run - trainer.current_epoch * of_epoch)

    def on_train_start(self, *hook: Any) -> None:
        super().on_train_start(*hook)
        self.on_train_epoch_start(*hook)  # Lightning does not of a run resumed within an epoch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.in_terminal:
            return
        n_done, total = batch_idx + 1, self.total_train_batches
        if n_done == total or n_done % max(1, total // LINES_IN_A_FILE) == 0:
            shown = self.get_metrics(trainer, pl_module)
            if shown == self.printed:  # nothing was logged since: the line would say nothing new
                return
            self.printed = shown
            words = [f"{n_done}/{total}", *(f"{name} {value}" for name, value in shown.items())]
            log.info(labels.line(f"epoch {trainer.current_epoch}", " · ".join(words)))

    def end_line(self) -> None:
        """Ends the bar, and its line: what is said next begins another."""
        if self._train_progress_bar is not None:
            self.train_progress_bar.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Of an end that comes early, too."""
        self.end_line()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        if isinstance(loss := self.logged.get("train/loss"), Tensor):
            self.logged["train/loss"] = f"{float(loss):.4f}"
        return {**self.logged, **super().get_metrics(trainer, pl_module)}

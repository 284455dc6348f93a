"""The progress bar: a tqdm bar in a terminal, and a few printed lines if output goes to a file."""

import logging
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from tqdm import tqdm

from gptrain.core import labels
from gptrain.core.lengths import RunLengths

log = logging.getLogger(__name__)
LINES_PER_EPOCH = 20  # highest number of printed lines if the output is not a terminal


class ProgressBar(TQDMProgressBar):
    """Lightning's tqdm bar, whose length is the number of micro-batches that the run uses.

    In a terminal the bar is redrawn at every micro-batch. If the output is not a terminal, at
    most 20 lines per epoch are printed instead, each only if a value was logged since the last. If
    neither the epoch nor the run has a known length, a line is printed whenever a value was logged.

    The constructor also replaces the lock of tqdm by one that is not shared between processes.

    Attributes:
        logged: Name -> value of the last logged step, set by `take_step`. A loss that is a tensor
            is replaced by its text when it is first shown.
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
        """Number of micro-batches of this epoch, which Lightning shows as the length of the bar.

        If the run ends within the epoch, only the micro-batches up to its end count. If the length
        of an epoch is unknown, it is the number of micro-batches of the whole run, or inf if that
        is unknown, too.
        """
        trainer = self.trainer
        epoch_batches = trainer.num_training_batches
        if trainer.max_steps < 0:
            return epoch_batches
        run_batches = trainer.max_steps * trainer.accumulate_grad_batches
        remaining = run_batches - trainer.current_epoch * epoch_batches
        # If the length of an epoch is unknown, all batches of the run count in each epoch.
        return min(epoch_batches, remaining) if remaining > 0 else run_batches

    def on_train_start(self, *args: Any) -> None:
        """Start the bar of the training and of its first epoch.

        Lightning does not start the bar of an epoch in which a run resumes.
        """
        super().on_train_start(*args)
        self.on_train_epoch_start(*args)  # Lightning skips this hook when it resumes in an epoch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the bar, or print a line if one is due and the output is not a terminal.

        At most 20 lines per epoch are due. A line is left out if no value was logged since the last
        one.
        """
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

    def take_step(self, values: Mapping[str, Any], lengths: RunLengths) -> None:
        """Show loss, learning rate and speed of a logged step until the next logged step.

        The remaining time is shown if the run has a known number of steps. All other values are
        ignored.

        Args:
            values: Logged name -> value. `train/loss`, `lr` and `perf/tokens_per_s` must be given,
                and if the run has a known number of steps also `step` and `perf/step_s`. A loss on
                a device is not read before it is shown.
            lengths: Lengths of the run, from which the remaining time is computed.

        Raises:
            KeyError: If a value that must be given is missing.
        """
        self.logged = {"train/loss": values["train/loss"], "lr": f"{values['lr']:.3g}"}
        self.logged[f"{lengths.unit}/s"] = f"{values['perf/tokens_per_s']:,.0f}"
        if lengths.n_steps:
            left_s = (lengths.n_steps - values["step"]) * values["perf/step_s"]
            self.logged["left"] = timedelta(seconds=round(left_s))

    def end_line(self) -> None:
        """Close the bar of the training, so that the next printed text begins on a new line.

        Does nothing if there is no such bar.
        """
        if self._train_progress_bar is not None:
            self.train_progress_bar.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close the bar, so that the error message begins on a new line."""
        self.end_line()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the values that the bar shows, by name.

        These are the values of the last logged step, and those that were logged with prog_bar=True.
        The first call after a logged step reads its loss, and so waits for the device.
        """
        if isinstance(loss := self.logged.get("train/loss"), Tensor):
            self.logged["train/loss"] = f"{float(loss):.4f}"
        return {**self.logged, **super().get_metrics(trainer, pl_module)}

"""The progress bar: a tqdm bar in a terminal, and a line every 30 seconds without one."""

import logging
import math
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm import tqdm

from gptrain.core import labels
from gptrain.core.lengths import RunLengths
from gptrain.lit.lightning import strategy_of

log = logging.getLogger(__name__)


class ProgressBar(TQDMProgressBar):
    """Lightning's tqdm bar in a terminal, with the values of the last logged step.

    If stdout is not a terminal, rank 0 logs a line after the first and the last step, and after a
    step if the next one would come more than `every_s` seconds after the last line. Its values are
    those of its own step. An evaluation prints its size when it begins, and then how far it is.
    """

    def __init__(self, every_s: float = 30.0):
        super().__init__()
        self.every_s = every_s
        self.in_terminal = sys.stdout.isatty()
        self._shown: dict[str, Any] = {}  # name -> value of the last step that was shown
        self._printed_s = -math.inf  # time of the last printed line
        if not self.in_terminal:
            self.disable()
        # The default lock of tqdm is a multiprocessing semaphore, which a killed rank would leak.
        tqdm.set_lock(threading.RLock())

    def on_train_start(self, *args: Any) -> None:
        """Start the bar of the training. Without a terminal, the first step prints a line."""
        super().on_train_start(*args)
        self._printed_s = -math.inf

    def end_step(
        self, trainer: Trainer, lr: float, step_s: float, lengths: RunLengths, is_logged: bool
    ) -> None:
        """Show a step in the bar if it was logged, or print it if a line is due, on rank 0.

        `lr` is the learning rate of the step, and `step_s` the seconds that a step takes now.
        """
        is_shown = is_logged if self.in_terminal else trainer.should_stop or self._is_due(step_s)
        if not is_shown or not trainer.is_global_zero:
            return
        step = trainer.global_step
        loss = float(strategy_of(trainer).step_mean.loss)  # waits for the device
        self._shown = {"step": f"{step}/{lengths.n_steps}" if lengths.n_steps else step}
        if not math.isnan(loss):
            self._shown["train/loss"] = f"{loss:.4f}"
        self._shown["lr"] = f"{lr:.3g}"
        self._shown[f"{lengths.unit}/s"] = f"{lengths.step_tokens / step_s:,.0f}"
        if lengths.n_steps:
            self._shown["left"] = timedelta(seconds=round((lengths.n_steps - step) * step_s))
        values = self.get_metrics(trainer, trainer.lightning_module)
        words = [f"{name} {value}" for name, value in values.items()]
        self._print("step", " · ".join(words).removeprefix("step "))

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the values of the last shown step, and those logged with prog_bar=True."""
        values = {**self._shown, **super().get_metrics(trainer, pl_module)}
        values.pop("v_num", None)  # version of a logger
        return values

    def on_validation_batch_start(self, *args: Any, **options: Any) -> None:
        """Update the bar of a validation, or without a terminal print its size or progress."""
        super().on_validation_batch_start(*args, **options)
        label = "check" if self.trainer.sanity_checking else "validate"
        self._print_evaluation(label, args[3], self.total_val_batches_current_dataloader)

    def on_test_batch_start(self, *args: Any, **options: Any) -> None:
        """Update the bar of a test, or without a terminal print its size or progress."""
        super().on_test_batch_start(*args, **options)
        self._print_evaluation("test", args[3], self.total_test_batches_current_dataloader)

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Close the bar, so that the error message begins on a new line."""
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()

    def _print_evaluation(self, label: str, n_done: int, n_batches: float) -> None:
        """Print the size of an evaluation before its first batch, later how far it is if due."""
        if n_done == 0:
            self._print(label, f"{n_batches} batches")
        elif self._is_due(0):
            self._print(label, f"{n_done}/{n_batches} batches")

    def _is_due(self, next_s: float) -> bool:
        """Return whether a line must be printed now, because the next one comes in `next_s`."""
        return time.monotonic() + next_s >= self._printed_s + self.every_s

    def _print(self, label: str, text: str) -> None:
        """Print a line, unless a bar is shown in a terminal."""
        if not self.in_terminal:
            log.info(labels.line(label, text))
            self._printed_s = time.monotonic()

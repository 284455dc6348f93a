"""The progress bar: a tqdm bar in a terminal, and a line every 30 seconds without one."""

import logging
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm import tqdm

from gptrain.core import labels
from gptrain.lit.lightning import data_of

log = logging.getLogger(__name__)


class ProgressBar(TQDMProgressBar):
    """Lightning's tqdm bar in a terminal, with the values of the last logged step.

    If stdout is not a terminal, lines are logged instead: after the first logged step, after the
    last one, and after any other that ends at least `every_s` seconds after the last line.

    Args:
        every_s: Smallest time between two lines, in seconds.
    """

    def __init__(self, every_s: float = 30.0):
        super().__init__()
        self.every_s = every_s
        self._in_terminal = sys.stdout.isatty()
        self._shown: dict[str, Any] = {}  # name -> value of the last logged step
        self._printed_s = time.monotonic()  # time of the last printed line
        if not self._in_terminal:
            self.disable()
        # The default lock of tqdm is a multiprocessing semaphore, which a killed rank would leak.
        tqdm.set_lock(threading.RLock())

    def show_step(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        """Show the logged values of a step in the bar, or log them if a line is due.

        Args:
            trainer: Trainer whose `global_step` is the number of steps done.
            values: Logged name -> value, a number or a scalar tensor. It has `lr`,
                `perf/tokens_per_s` and `perf/step_s`, and may have `train/loss`. Others are not
                shown.
        """
        lengths, step = data_of(trainer).lengths, trainer.global_step
        is_due = trainer.should_stop or not self._shown  # the last or the first step
        self._shown = {"step": f"{step}/{lengths.n_steps}" if lengths.n_steps else step}
        if "train/loss" in values:
            self._shown["train/loss"] = f"{float(values['train/loss']):.4f}"
        self._shown["lr"] = f"{values['lr']:.3g}"
        self._shown[f"{lengths.unit}/s"] = f"{values['perf/tokens_per_s']:,.0f}"
        if lengths.n_steps:
            left_s = (lengths.n_steps - step) * values["perf/step_s"]
            self._shown["left"] = timedelta(seconds=round(left_s))
        shown = self.get_metrics(trainer, trainer.lightning_module).items()
        words = " · ".join(f"{name} {value}" for name, value in shown)
        self._print("step", words.removeprefix("step "), is_due)

    def on_validation_batch_end(  # ty: ignore[incompatible-method-override]
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *rest: Any
    ) -> None:
        """Update the bar, or print how far the validation is if a line is due."""
        super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, *rest)
        n_batches = self.total_val_batches_current_dataloader
        self._print("validate", f"{batch_idx + 1} of {n_batches} batches")

    def _print(self, label: str, text: str, is_due: bool = False) -> None:
        """Print a line, unless this is a terminal or the last line is younger than `every_s`."""
        is_due |= time.monotonic() >= self._printed_s + self.every_s
        if is_due and not self._in_terminal:
            log.info(labels.line(label, text))
            self._printed_s = time.monotonic()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the values of the last logged step, and those logged with prog_bar=True."""
        values = {**self._shown, **super().get_metrics(trainer, pl_module)}
        values.pop("v_num", None)  # version of a logger
        return values

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Close the bar, so that the error message begins on a new line."""
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()

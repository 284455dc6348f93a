"""Lightning's loggers, writing straight into the run folder and never ending a run."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.logger import _flatten_dict
from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger(__name__)


def survives_trouble(method: Callable[..., Any]) -> Callable[..., Any]:
    """A log folder that is full or gone costs points of a curve, never the run: one warning."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if self.broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except OSError as error:
            self.broken = True
            log.warning("%s stops: %s; training goes on", type(self).__name__, error)
            return None

    return guarded


class TensorBoardLogger(pl_loggers.TensorBoardLogger):
    """Events in `save_dir` itself: a resumed run goes on in the same place."""

    broken = False

    def __init__(self, save_dir: str):
        super().__init__(save_dir=save_dir, name="", version="", default_hp_metric=False)

    log_metrics = survives_trouble(pl_loggers.TensorBoardLogger.log_metrics)

    @survives_trouble
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *_: Any, **__: Any) -> None:
        """Fills the HPARAMS tab at the start of a run; its metric is val/loss as logged later."""
        from torch.utils.tensorboard.summary import hparams  # seconds, so not at import

        super().log_hyperparams(params)
        flat = self._sanitize_params(_flatten_dict(params, delimiter="."))
        for summary in hparams(flat, {"val/loss": math.nan}):
            self.experiment._get_file_writer().add_summary(summary)

    save = survives_trouble(pl_loggers.TensorBoardLogger.save)

    def finalize(self, status: str) -> None:
        with contextlib.suppress(OSError):
            super().finalize(status)


class CSVLogger(pl_loggers.CSVLogger):
    """metrics.csv in `save_dir` itself."""

    broken = False

    def __init__(self, save_dir: str):
        super().__init__(save_dir=save_dir, name="", version="", flush_logs_every_n_steps=1)

    log_metrics = survives_trouble(pl_loggers.CSVLogger.log_metrics)
    save = survives_trouble(pl_loggers.CSVLogger.save)

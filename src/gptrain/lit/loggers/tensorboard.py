"""TensorBoard events."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from lightning.fabric.utilities.logger import _flatten_dict
from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.utilities import rank_zero_only

from gptrain.lit.loggers.trouble import survives_trouble


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

    @survives_trouble
    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Makes readers forget the points of step and after it, by the event meant for that."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self.experiment._get_file_writer().add_event(Event(step=step, session_log=start))

    save = survives_trouble(pl_loggers.TensorBoardLogger.save)

    def finalize(self, status: str) -> None:
        with contextlib.suppress(OSError):
            super().finalize(status)

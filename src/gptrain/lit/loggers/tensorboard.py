"""TensorBoard events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.utilities import rank_zero_only

from gptrain.lit.loggers.survive_trouble import SurvivesTrouble


class TensorBoardLogger(SurvivesTrouble, pl_loggers.TensorBoardLogger):
    """Events in `save_dir` itself: a resumed run goes on in the same place."""

    def __init__(self, save_dir: str):
        super().__init__(save_dir=save_dir, name="", version="", default_hp_metric=False)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step is not None:
            super().log_metrics(metrics, step)

    def log_hyperparams(self, params: dict[str, Any], *_: Any, **__: Any) -> None:
        """Fills the HPARAMS tab at the start of a run; its metric is val/loss as logged later."""
        super().log_hyperparams(params, {"val/loss": math.nan})  # without a step: no point

    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Makes readers forget the points after step, by the event meant for that."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self.experiment._get_file_writer().add_event(Event(step=step + 1, session_log=start))

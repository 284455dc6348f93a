"""TensorBoard events."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.utilities import rank_zero_only

from gptrain.lit.loggers.survive_trouble import survives_trouble


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
        for summary in hparams(dict(_flat(params)), {"val/loss": math.nan}):
            self.experiment._get_file_writer().add_summary(summary)

    @survives_trouble
    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Makes readers forget the points after step, by the event meant for that."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self.experiment._get_file_writer().add_event(Event(step=step + 1, session_log=start))

    save = survives_trouble(pl_loggers.TensorBoardLogger.save)

    def finalize(self, status: str) -> None:
        with contextlib.suppress(OSError):
            super().finalize(status)


def _flat(node: Any, name: str = "") -> list[tuple[str, Any]]:
    """(`model.d_model`, 512) of nested mappings; what TensorBoard has no type for, as text."""
    if isinstance(node, dict) and node:
        parts = ((f"{name}.{key}" if name else str(key), value) for key, value in node.items())
        return [pair for part, value in parts for pair in _flat(value, part)]
    return [(name, node if isinstance(node, bool | int | float | str) else str(node))]

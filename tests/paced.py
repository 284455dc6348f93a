"""A callback that gives the first start of a run long steps, so that tests can interrupt it."""

from __future__ import annotations

import os
import time

from lightning.pytorch import Callback


class Paced(Callback):
    """Sleeps at each step of a job that SLURM has not requeued yet."""

    def on_train_batch_start(self, *_: object) -> None:
        if not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            time.sleep(0.5)

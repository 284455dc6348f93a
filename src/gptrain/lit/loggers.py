"""Loggers that write into the run folder, and continue the same curves when a run resumes.

A value has one name everywhere: in metrics.jsonl, in TensorBoard, as `checkpoint.monitor` and on
the console. Every Lightning logger works. If a logger has a method `discard_after(step)`, gptrain
calls it at the start of training with the number of optimizer steps done: a resumed run repeats the
steps after its checkpoint, so the logger removes their points.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gptrain.checkpoints import files
from gptrain.checkpoints.lock import read_run_id
from gptrain.core.small_files import read_bytes

STEP = "step"  # Lightning uses a logged value of this name as the x axis, and then logs no epoch
_FLUSH_S = 5  # interval at which TensorBoard reads new points, in seconds


class JsonLinesLogger(Logger):
    """Logger of every run, which writes `save_dir`/metrics.jsonl with one object per logged step.

    An object has the key `step` and the logged names. A value that is not finite is null. Only rank
    0 writes.
    """

    name = ""
    version = ""

    def __init__(self, save_dir: str):
        super().__init__()
        self._path = Path(save_dir) / "metrics.jsonl"
        # Row that was written last, on rank 0 only. None before the first write.
        self._last_row: dict[str, Any] | None = None

    @property
    def save_dir(self) -> str:
        """Folder of the file, which Lightning's profilers and callbacks read."""
        return str(self._path.parent)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: .hydra/config.yaml in the run folder holds the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the row of a step, and write the row to the file, on rank 0 only.

        A `step` of None, or before that of the last row, stands for the last row. Raises an OSError
        if the file cannot be written.
        """
        if self._last_row is None:
            self.discard_after(math.inf)
        last = self._last_row or {}
        row = {STEP: max(int(step or 0), last.get(STEP, -1))}
        row |= {name: float(value) for name, value in metrics.items() if name != STEP}
        is_same = row[STEP] == last.get(STEP)
        self._last_row = last | row if is_same else row
        with self._path.open("r+b") as file:  # no wait for the disk
            file.seek(-len(files.to_json(last, None)) if is_same else 0, os.SEEK_END)
            file.write(files.to_json(self._last_row, None))
            file.truncate()

    @rank_zero_only
    def discard_after(self, step: float) -> None:
        """Remove the rows after `step` from the file, and a last row that was written in part.

        Only rank 0 does this. Raises an OSError if the file cannot be read or written.
        """
        rows = []
        for line in read_bytes(self._path).splitlines() if self._path.exists() else ():
            with suppress(ValueError, TypeError, LookupError, RecursionError):  # no row of a step
                row = json.loads(line)
                if row[STEP] <= step:
                    rows.append(row)
        files.replace(self._path, b"".join(files.to_json(row, None) for row in rows))
        self._last_row = rows[-1] if rows else {}


class TensorBoardLogger(pl_loggers.TensorBoardLogger):
    """Logger that writes TensorBoard events into `save_dir` itself, without subfolders."""

    def __init__(self, save_dir: str):
        super().__init__(
            save_dir=save_dir, name="", version="", default_hp_metric=False, flush_secs=_FLUSH_S
        )

    @rank_zero_only
    def discard_after(self, step: int) -> None:
        """Make TensorBoard hide the points after `step`, the number of optimizer steps done."""
        # The generated protobuf module has no type stubs.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # ty: ignore[missing-module-member]

        start = SessionLog(status=SessionLog.START)
        self.experiment._get_file_writer().add_event(Event(step=step + 1, session_log=start))

    @rank_zero_only
    def save(self) -> None:
        """Write buffered events to disk, on rank 0, but no hparams.yaml as Lightning does."""
        self.experiment.flush()


class WandbLogger(pl_loggers.WandbLogger):
    """Logger that gives the W&B run the id of the run folder, so that a resumed run continues it.

    The service does not delete points: the steps that a resumed run repeats are logged twice.
    `save_dir` is the run folder, and the other options are those of Lightning's WandbLogger.
    """

    def __init__(self, save_dir: str, **options: Any):
        super().__init__(save_dir=save_dir, id=read_run_id(save_dir) or None, **options)
        self._wandb_init.pop("anonymous", None)  # wandb warns about this argument for any value

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Finish the Weights & Biases run, so that the next job in this process starts its own."""
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None

"""Weights & Biases."""

from typing import Any

from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.utilities import rank_zero_only

from gptrain.checkpoints.lock import read_holder


class WandbLogger(pl_loggers.WandbLogger):
    """A run of Weights & Biases whose id is that of the run folder.

    So a run that is resumed or requeued goes on in the same one, and each job of a sweep has its
    own. The service keeps what it was sent: points of an attempt that died after its last
    checkpoint stay beside those of the next.

    Args:
        options: any of wandb.init's (project, mode, entity, group, tags …).
    """

    def __init__(self, save_dir: str, **options: Any):
        super().__init__(save_dir=save_dir, id=read_holder(save_dir).get("run_id"), **options)
        self._wandb_init.pop("anonymous", None)  # wandb warns of it, whatever its value

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Closes the run, so that the next job of a sweep in this process opens its own."""
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None

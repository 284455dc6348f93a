"""The Weights & Biases logger, whose run id is the id of the run folder."""

from typing import Any

from lightning.pytorch import loggers as pl_loggers
from lightning.pytorch.utilities import rank_zero_only

from gptrain.checkpoints.lock import read_holder


class WandbLogger(pl_loggers.WandbLogger):
    """Logger that gives the Weights & Biases run the id of the run folder.

    A resumed or requeued run therefore continues the same Weights & Biases run, and each job of a
    sweep has its own. The service does not delete points: if a run died after its last checkpoint,
    the steps that the resumed run repeats are logged twice.

    Args:
        save_dir: Run folder, which also holds wandb's files. If it has no lock file with an id,
            wandb chooses an id.
        **options: Arguments of Lightning's WandbLogger and of wandb.init, such as project, mode,
            entity, group and tags.

    Raises:
        ModuleNotFoundError: If the package wandb is not installed.
    """

    def __init__(self, save_dir: str, **options: Any):
        super().__init__(save_dir=save_dir, id=read_holder(save_dir).get("run_id"), **options)
        self._wandb_init.pop("anonymous", None)  # wandb warns about this argument for any value

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Finish the Weights & Biases run, so that the next job in this process starts its own.

        Only rank 0 does so. Lightning's method is called first. Nothing else is done if no run was
        started.

        Args:
            status: Lightning's status. Any status but `success` marks the run as failed.
        """
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None

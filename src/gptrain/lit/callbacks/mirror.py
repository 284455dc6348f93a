"""Copies each checkpoint of a run elsewhere while its steps go on."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from gptrain.lit.callbacks.checkpoints import WRITING_S
from gptrain.parallel.mesh import wait_for_rank_0
from gptrain.resilience.mirror import Mirror
from gptrain.resilience.status import Preempted
from gptrain.resilience.store import CheckpointStore


class Mirrored(Checkpoint):
    """No rank of a run that ends, or was asked to stop, leaves before the last copy is there.

    A launcher ends all ranks soon after the first has left. It stands behind `Checkpoints`, which
    saves last of all.
    """

    def __init__(self, store: CheckpointStore, mirror: Mirror):
        self.store, self.mirror = store, mirror
        store.on_commit = lambda path: mirror.update(store)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._wait(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, Preempted) and exception.step is not None:  # all ranks agreed
            self._wait(trainer)

    def _wait(self, trainer: Trainer) -> None:
        if self.store.progress:
            self.store.progress(phase="mirror", allow_s=WRITING_S)
        wait_for_rank_0(self._copy_the_rest, trainer.global_rank, WRITING_S)

    def _copy_the_rest(self) -> Any:
        self.mirror.update(self.store)  # what is there of a start that was killed, or pruned
        self.mirror.wait()

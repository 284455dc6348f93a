"""Two decisions about saves: whether to save after an error, and whether to amend a checkpoint.

To amend a checkpoint means to add what a validation has changed, instead of saving it again.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from gptrain.checkpoints.manifest import STATE_NAME, read_manifest
from gptrain.checkpoints.safe_load import load_file
from gptrain.checkpoints.status import RefusedStepError
from gptrain.checkpoints.writer import SaveFailedError
from gptrain.core.errors import CAUSES, ending_of
from gptrain.lit.lightning import strategy_of
from gptrain.parallel.mesh import gather


def may_save(trainer: Trainer, exception: BaseException) -> bool:
    """Return whether the newest complete step can be saved after an error of the training.

    A save needs all ranks, so the answer is True in a run of one process only. It is False if the
    optimizer may have updated only some of the parameters, if a save has failed, and after an error
    for which a save makes no sense.

    Args:
        trainer: Trainer of the run.
        exception: Error of this rank.
    """
    is_salvaged = CAUSES[ending_of(exception).cause].is_salvaged
    if not is_salvaged or isinstance(exception, SaveFailedError | RefusedStepError):
        return False
    return trainer.world_size == 1 and not strategy_of(trainer).is_updating


def allow_amendment(trainer: Trainer, path: Path) -> None:
    """Let the first validation of a resumed run amend the checkpoint from which the run resumed.

    Call it if the checkpoint was saved before the validation of its step, which the resumed run
    repeats. The metrics of this validation are then added to the checkpoint, instead of a second
    save of the same step. Does nothing if `path` does not exist, because the run resumed from
    another run's checkpoint, or if the current strategy writes another kind of checkpoint. All
    ranks must call it.

    Args:
        trainer: Trainer of the run, whose weights and optimizer state are loaded.
        path: Folder of the checkpoint of the current step in this run's store.

    Raises:
        DamagedCheckpointError: On rank 0, if the checkpoint was damaged after it was verified.
    """
    strategy = strategy_of(trainer)
    state: dict[str, Any] = {}
    can_amend = True
    if trainer.is_global_zero:
        kind = "sharded" if strategy.parallel.is_partitioned else "full"
        can_amend = path.is_dir() and read_manifest(path)["kind"] == kind
        if can_amend:
            state = load_file(path / STATE_NAME, mmap=True)
    if all(gather(can_amend)):
        strategy.take_fingerprints(state)

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
from gptrain.lit.callbacks.vote import n_collectives
from gptrain.lit.lightning import strategy_of
from gptrain.parallel.mesh import gather
from gptrain.runtime.agreement import all_agree

AGREEMENT_S = 3.0  # time that a failed rank waits for the other ranks to fail, in seconds


def may_save(
    trainer: Trainer, exception: BaseException, facts: list[Any], agreement_folder: Path
) -> bool:
    """Return whether the newest complete step can be saved after an error of the training.

    A save needs all ranks. So the answer is True only if every rank has failed and calls this
    function with the same `facts`. Waits for the other ranks for at most AGREEMENT_S. The answer is
    False if the optimizer may have updated only some of the parameters. It is also False, without a
    wait, if a save has failed, or after an error for which a save makes no sense, such as a failed
    network between the ranks. The answer is the same on all ranks.

    Args:
        trainer: Trainer of the run.
        exception: Error of this rank.
        facts: Plain values that describe the save. A save is possible only if they are equal on all
            ranks.
        agreement_folder: Shared folder of this start of the run, in which the ranks agree.

    Raises:
        OSError: If there are several ranks, and the folder cannot be read or written.
    """
    is_salvaged = CAUSES[ending_of(exception).cause].is_salvaged
    if not is_salvaged or isinstance(exception, SaveFailedError | RefusedStepError):
        return False
    facts = [*facts, strategy_of(trainer).is_updating, n_collectives()]
    rank, world_size = trainer.global_rank, trainer.world_size
    is_agreed = all_agree(agreement_folder, rank, world_size, facts, AGREEMENT_S)
    return is_agreed and not strategy_of(trainer).is_updating


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

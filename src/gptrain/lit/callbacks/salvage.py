"""Whether a run that failed may still save its newest complete step."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from gptrain.checkpoints.manifest import STATE_NAME, read_manifest
from gptrain.checkpoints.safe_load import load_file
from gptrain.core.errors import ending_of
from gptrain.lit.callbacks.vote import gather, n_collectives
from gptrain.lit.lightning import strategy_of
from gptrain.runtime.agreement import all_agree

AGREEING_S = 3.0  # a rank that failed waits that long for the others to fail, too
SALVAGED = ("error", "memory", "nonfinite", "config")  # causes of `ending_of` after which to save


def may_save(trainer: Trainer, exception: BaseException, facts: list[Any], place: Path | None):
    """Return whether all ranks have failed in the same state, from which a save is possible.

    Not so where the optimizer may have changed some of the parameters only, where other ranks have
    not failed, or where the failure is one of the disk or of the ranks' network. The answer is the
    same on all ranks that ask.

    Args:
        facts: What this rank would save.
        place: Folder of this start that all ranks share; None: several ranks cannot agree.
    """
    if ending_of(exception).cause not in SALVAGED:
        return False
    facts = [*facts, strategy_of(trainer).is_updating, n_collectives()]
    rank, world_size = trainer.global_rank, trainer.world_size
    if world_size > 1 and (
        place is None or not all_agree(place, rank, world_size, facts, AGREEING_S)
    ):
        return False
    return not strategy_of(trainer).is_updating


def note_loaded(trainer: Trainer, path: Path) -> None:
    """Let a validation that is repeated amend the checkpoint at path, from which the run resumed.

    Does nothing unless that is one of this run's own, and what this strategy would have written.
    All ranks must call it.
    """
    strategy, state, is_fitting = strategy_of(trainer), {}, True
    if trainer.is_global_zero:
        kind = "sharded" if strategy.parallel.is_partitioned else "full"
        is_fitting = path.is_dir() and read_manifest(path)["kind"] == kind
        if is_fitting:
            state = load_file(path / STATE_NAME, mmap=True)
            is_fitting = ("replicas" in state) == strategy.has_replicas
    if all(gather(is_fitting)):
        strategy.note_saved(state)

"""How a step is saved: Lightning collects the state, and the strategy writes it to the store."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from gptrain.checkpoints.manifest import folder_name
from gptrain.checkpoints.store import CheckpointStore
from gptrain.lit.lightning import strategy_of
from gptrain.parallel.mesh import gather


def write_checkpoint(
    trainer: Trainer,
    store: CheckpointStore,
    *,
    config: dict[str, Any],
    metrics: dict[str, float] | None,
    needed_bytes: int,
    in_background: bool,
) -> None:
    """Write a new checkpoint of the current step. All ranks must call this function.

    Args:
        trainer: Trainer of the run.
        store: Checkpoints of the run.
        config: Config key -> value for all keys that a resumed run must not change.
        metrics: Metrics of the validation after this step. None if there are none yet.
        needed_bytes: Expected size of the checkpoint, over all ranks.
        in_background: Whether a thread writes the files while training continues. They become a
            checkpoint when `store.finish` is called, which also raises the errors of the thread.

    Raises:
        SaveFailedError: On all ranks, if a rank could not write its files, or if the disk has no
            space for `needed_bytes`.
        ValueError: If the store has no `run_id`, or if the optimizer's state has a value that a
            sharded checkpoint cannot hold.
    """
    strategy = strategy_of(trainer)
    writing = store.writing(
        trainer.global_step,
        kind="sharded" if strategy.parallel.is_partitioned else "full",
        config=config | strategy.base_entries,
        metrics=metrics,
        needed_bytes=needed_bytes,
        rank=trainer.global_rank,
        gather=gather,
        in_background=in_background,
    )
    with writing as writer:
        _save_through_lightning(trainer, writer.path, writer)


def amend_checkpoint(trainer: Trainer, store: CheckpointStore, metrics: dict[str, float]) -> None:
    """Add metrics and changed callback states to the checkpoint of the current step.

    The checkpoint was saved before the validation of the step, and `is_unchanged_since_save` has
    returned True on all ranks. All ranks must call this function.

    Args:
        trainer: Trainer of the run.
        store: Checkpoints of the run.
        metrics: Metrics of the validation.

    Raises:
        SaveFailedError: On all ranks, if rank 0 could not write the additional file. If the
            checkpoint is still being saved in the background, `store.finish` raises this error.
    """
    files: dict[str, bytes] = {}
    _save_through_lightning(trainer, store.folder / folder_name(trainer.global_step), files)
    store.amend(trainer.global_step, files, metrics, rank=trainer.global_rank, gather=gather)


def _save_through_lightning(trainer: Trainer, path: Path, storage: Any) -> None:
    """Let Lightning collect the state of the run and pass it to the strategy.

    Meanwhile `saves_to_store` of the strategy is True. All ranks must call this function.

    Args:
        trainer: Trainer of the run.
        path: Path that Lightning passes to `SavingStrategy.save_checkpoint`.
        storage: CheckpointWriter for a new checkpoint, or a dict that gets the files of an
            amendment. Lightning passes it to `save_checkpoint` as `storage_options`.
    """
    strategy = strategy_of(trainer)
    strategy.saves_to_store = True
    try:
        trainer.save_checkpoint(path, weights_only=False, storage_options=storage)
    finally:  # after an error OnExceptionCheckpoint may write a file of its own
        strategy.saves_to_store = False

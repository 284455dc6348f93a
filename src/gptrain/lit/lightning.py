"""Every use of Lightning's private names and undeclared attributes, as of Lightning 2.6.6.

The private names are needed for six purposes, each with a test that the name still exists:
Lightning's signal handlers, its broadcast of a stop request, its automatic search for a checkpoint,
the state of its loops and of the values that it averages over an epoch, in a checkpoint, and
whether it may stop before the last step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector import result

from gptrain.lit.datamodule import TextDataModule
from gptrain.lit.strategies.base import GPTStrategy
from gptrain.lit.user_data import USER_DATA


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the trainer's callbacks, in the order in which Lightning calls them."""
    return trainer.callbacks  # ty: ignore[missing-attribute]


def data_of(trainer: pl.Trainer) -> TextDataModule:
    """Return the TextDataModule of the run, or the UserData of a user's own LightningDataModule.

    A UserData has only some attributes of a TextDataModule: `lengths`, `tokens`, `step_samples`,
    and `train` and `val`, which are None.
    """
    datamodule = trainer.datamodule  # ty: ignore[missing-attribute]
    return getattr(datamodule, USER_DATA, datamodule)


def strategy_of(trainer: pl.Trainer) -> GPTStrategy:
    """Return the strategy of the run, which is always a GPTStrategy."""
    return cast(GPTStrategy, trainer.strategy)


def disable_signals_and_autoresume(trainer: pl.Trainer) -> pl.Trainer:
    """Remove Lightning's signal handlers and its own search for a checkpoint; return the trainer.

    - Lightning's SIGTERM handler calls a collective, exits with code 0 and saves nothing. To stop
      all ranks, Lightning broadcasts one number per micro-batch and waits for it. `TrainingMonitor`
      replaces both.
    - `fit(ckpt_path=None)` looks for files that another run may have left.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    use_checkpoint(trainer, None)
    return trainer


def use_checkpoint(trainer: pl.Trainer, path: Path | None) -> None:
    """Set the checkpoint that fit, validate and test load. With None they keep the weights.

    Without this call Lightning would search for one.
    """
    trainer.ckpt_path = path
    trainer._checkpoint_connector._user_managed = True


def loop_state_after(trainer: pl.Trainer, step: int, repeats_validation: bool) -> dict[str, Any]:
    """Return Lightning's state of `trainer.fit_loop` with which a run resumes after a step.

    Args:
        trainer: Trainer that has not begun to train.
        step: Number of optimizer steps that are done.
        repeats_validation: True lets the run begin with the validation after this step.
    """
    accumulate = trainer.accumulate_grad_batches
    epoch_steps = data_of(trainer).lengths.epoch_steps
    epoch, step_in_epoch = divmod(step, epoch_steps)
    if step_in_epoch == 0 and step and repeats_validation:  # the epoch's end is still to come
        epoch = epoch - 1
        step_in_epoch = epoch_steps
    state = trainer.fit_loop.state_dict()  # all counters of the new loop are 0
    state["epoch_progress"] = _counters(epoch, epoch, n_begun=1 if step_in_epoch else 0)
    # A resumed run goes through the end of Lightning's loop body again for a step after which a
    # validation is due, and that code counts the step for the loggers.
    n_counted = step - 1 if step_in_epoch and repeats_validation else step
    state["epoch_loop.state_dict"] = {"_batches_that_stepped": n_counted}
    state["epoch_loop.batch_progress"] = {
        **_counters(step * accumulate, step_in_epoch * accumulate),
        "is_last_batch": step_in_epoch == epoch_steps,
    }
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    optimizer["step"] = _counters(step, step_in_epoch)
    # A validation loop with a batch begun and none done starts with its first batch.
    validation = state["epoch_loop.val_loop.batch_progress"]
    validation |= _counters(0, 0, n_begun=1 if repeats_validation else 0)
    return state


def ends_epoch(trainer: pl.Trainer) -> bool:
    """Return whether the optimizer step that was taken most recently is the last of its epoch."""
    return trainer.global_step % data_of(trainer).lengths.epoch_steps == 0


def is_validated(trainer: pl.Trainer, step: int) -> bool:
    """Return whether Lightning runs a validation right after an optimizer step.

    A validation follows at the interval of the run and where `trainer.should_stop` ends it, which
    Lightning ignores before `min_steps`, unless validations are switched off. `step` is the number
    of optimizer steps that are done.
    """
    is_due = step % data_of(trainer).lengths.validate_every == 0
    is_end = trainer.should_stop and trainer.fit_loop._can_stop_early
    return trainer.enable_validation and (is_due or is_end)


def epoch_results(trainer: pl.Trainer) -> list[tuple[Any, ...]]:
    """Return what `self.log(..., on_epoch=True)` has added up in this epoch, on this rank.

    Each tuple has what `load_epoch_results` needs, also for a metric of torchmetrics.
    """
    saved = []
    for item in trainer.fit_loop.epoch_loop._results.values():
        if item.meta.on_epoch and not item.has_reset:
            meta, sync = item.meta, item.meta.sync
            plain = {**vars(meta), "reduce_fx": meta.reduce_fx.__name__, "_sync": None}
            owner = item if item.is_tensor else item.value
            saved.append((plain, (sync.should, sync.rank_zero_only), owner.metric_state))
    return saved


def load_epoch_results(trainer: pl.Trainer, saved: list[tuple[Any, ...]]) -> None:
    """Let the means of an epoch go on from a result of `epoch_results`, when training starts."""
    for plain, sync, state in saved:
        meta = result._Metadata(**plain)
        meta.sync = result._Sync(trainer.strategy.reduce, *sync)
        owner = item = cast(Any, result._ResultMetric(meta, meta.metric_attribute is None))
        if meta.metric_attribute is not None:
            module: Any = trainer.lightning_module
            owner = item.value = module.get_submodule(meta.metric_attribute)
        for name, value in state.items():
            setattr(owner, name, value)
        owner._update_count = item._update_count = 1
        results = trainer.fit_loop.epoch_loop._results
        results[f"{meta.fx}.{meta.name}"] = item.to(trainer.strategy.root_device)
        # The first batch of an epoch would begin new sums.
        trainer._logger_connector._first_loop_iter = False


def run_after_step(module: pl.LightningModule, function: Callable[..., object]) -> None:
    """Call a function after each call of the module's `on_train_batch_end`, with its arguments.

    The hook may change what is saved, such as averages of weights, and Lightning has no other one
    between it and the load of the next batch.
    """
    hook = module.on_train_batch_end
    cast(Any, module).on_train_batch_end = lambda *call: (hook(*call), function(*call))


def resume_schedules(trainer: pl.Trainer) -> None:
    """Let ReduceLROnPlateau schedules of a resumed run change as in a run that was never stopped.

    Clears flags because of which Lightning would leave out their update at the end of an epoch. If
    the run resumes within an epoch, and not from a validation, makes the update that Lightning
    makes after the hooks that save a step.
    """
    trainer.fit_loop._restarting = False
    if not trainer.fit_loop.epoch_loop.batch_progress.current.ready:
        trainer.fit_loop.epoch_loop.restarting = False
    if not ends_epoch(trainer) and not is_validated(trainer, trainer.global_step):
        trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def _counters(total: int, current: int, n_begun: int = 0) -> dict[str, Any]:
    """Return the state of one of Lightning's counters, of which `n_begun` are not complete."""
    done = {"total": total, "current": current}
    ahead = {"ready": n_begun, "started": n_begun, "processed": 0, "completed": 0}
    return {kind: {name: n + more for name, more in ahead.items()} for kind, n in done.items()}


def ends_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether a micro-batch is the last of its optimizer step.

    `batch_idx` counts the micro-batches of an epoch from 0. An epoch has complete steps only.
    """
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0

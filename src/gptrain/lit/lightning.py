"""Where we touch Lightning itself: every private name of it that we rely on stands in this file.

Four places, each for correctness, each as of Lightning 2.6.6 and with a test that the name exists:
its signal handlers, its broadcast of a stop, its search for a checkpoint that nobody named, and the
state of its loops in a checkpoint.
"""

import logging
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from gptrain.core.errors import ConfigError
from gptrain.lit.datamodule import TextDataModule
from gptrain.lit.strategies.base import LightningStrategy
from gptrain.runtime.process import Process

NOISE = (
    "isinstance(treespec, LeafSpec)",  # Lightning 2.6 on torch 2.13
    "The number of training batches",  # the last step is logged whatever the interval
    "It is recommended to use `self.log",  # torchmetrics has reduced over ranks already
    "You're resuming from a checkpoint that ended before the epoch ended",  # our order resumes
    "does not have many workers",  # batches are one gather from a memory map
    "You called `self.log('step'",  # the x axis of all loggers: see callbacks.monitor
    "but loading a checkpoint outside the 'fit' stage",  # WeightAveraging: averages are loaded
    "The `srun` command is available",  # ranks are ours on a login node, too: RankEnvironment
    "Checkpoint directory",  # of a ModelCheckpoint: a resumed run goes on in the same folder
)


class RankEnvironment(TorchElasticEnvironment):
    """This process's place in the job, as gptrain.runtime.process reads it of any launcher.

    Lightning's guess takes a run that is started by hand in a SLURM allocation for a task of srun
    (pytorch-lightning#20391), and refuses `srun --ntasks`. The process group exists already, so
    that the address is not asked for.
    """

    def __init__(self, process: Process, n_local: int):
        self.process, self.n_local = process, n_local

    def world_size(self) -> int:
        return self.process.world_size

    def global_rank(self) -> int:
        return self.process.rank

    def local_rank(self) -> int:
        return self.process.local_rank

    def node_rank(self) -> int:
        return self.process.rank // self.n_local

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nothing: of several GPUs the Trainer is told one, see assemble.trainer."""


def connected(trainer: pl.Trainer) -> Any:
    """The trainer with what its connectors set and its class does not declare."""
    return trainer


def data_of(trainer: pl.Trainer) -> TextDataModule:
    """The run's own; Lightning's trainer declares none."""
    return connected(trainer).datamodule


def strategy_of(trainer: pl.Trainer) -> LightningStrategy:
    """The run's own."""
    return connected(trainer).strategy


def start_as_asked(trainer: pl.Trainer) -> pl.Trainer:
    """Make the Trainer obey the run alone: no signal handler, no checkpoint of its own choice.

    - Lightning's SIGTERM handler calls a collective inside the signal handler, exits with code 0
      and saves nothing. To stop the ranks Lightning then broadcasts, and waits for, one number per
      micro-batch. `callbacks.monitor` does this work.
    - `fit(ckpt_path=None)` looks for files that another run may have left: `hpc_ckpt_<n>.ckpt` in
      default_root_dir under SLURM, and the file of an OnExceptionCheckpoint. A path that counts as
      set by the user ends the search; `use_checkpoint` sets it, also to None.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    use_checkpoint(trainer, None)
    return trainer


def use_checkpoint(trainer: pl.Trainer, path: Path | None) -> None:
    """Set the one checkpoint from which fit, validate and test start; None for initial weights."""
    trainer.ckpt_path = path
    trainer._checkpoint_connector._user_managed = True


def loops_after(trainer: pl.Trainer, step: int, validated: bool) -> dict:
    """State of Lightning's loops for a run that stands right after optimizer step `step`.

    Lightning saves what each of its thirty counters was in the middle of a hook and guesses from
    it where the save happened: a save after a validation, before it, or inside it differ by ones
    in several places. A run here is saved after an optimizer step only, so two facts determine
    all counters, on any number of ranks.

    Args:
        validated: what is due after this step is done: a validation, and the hooks of an epoch's
            end; false repeats it.
    """
    accumulate, epoch_steps = trainer.accumulate_grad_batches, data_of(trainer).epoch_steps
    epoch, step_in_epoch = divmod(step, epoch_steps)
    if step_in_epoch == 0 and step and not validated:
        epoch, step_in_epoch = epoch - 1, epoch_steps
    begun = int(step_in_epoch > 0)  # the epoch's first hooks have run
    # A step whose validation is due passes once more through the end of Lightning's loop body,
    # which counts it for the loggers.
    passes_again = begun and (is_validated(trainer, step) or not validated)
    val_begun = int(not validated)  # one batch begun and none finished: validate from the first
    names = ("ready", "started", "processed", "completed")
    state = trainer.fit_loop.state_dict()  # of a run that has not begun: all zeros
    state["epoch_progress"] = _counts(epoch, epoch, names, ready=begun, started=begun)
    state["epoch_loop.state_dict"] = {"_batches_that_stepped": step - int(passes_again)}
    state["epoch_loop.batch_progress"] = {
        **_counts(step * accumulate, step_in_epoch * accumulate, names),
        "is_last_batch": step_in_epoch == epoch_steps,
    }
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    optimizer["step"] = _counts(step, step_in_epoch, ("ready", "completed"))
    validation = state["epoch_loop.val_loop.batch_progress"]
    validation |= _counts(0, 0, names, ready=val_begun, started=val_begun)
    return state


def is_validated(trainer: pl.Trainer, step: int) -> bool:
    """Whether a validation follows this optimizer step."""
    is_turn = step % data_of(trainer).validate_every == 0
    return trainer.enable_validation and (is_turn or trainer.should_stop)


def finish_step(trainer: pl.Trainer, step: int, validated: bool) -> None:
    """What Lightning does of a step after the hooks in which it was saved: ReduceLROnPlateau.

    A step whose validation is due passes through that part of its loop again.
    """
    accumulate = trainer.accumulate_grad_batches
    epoch, step_in_epoch = divmod(step, data_of(trainer).epoch_steps)
    if not validated or (step_in_epoch and is_validated(trainer, step)):
        return
    interval, index = ("step", step_in_epoch * accumulate) if step_in_epoch else ("epoch", epoch)
    for scheduled in trainer.lr_scheduler_configs:
        is_its_turn = scheduled.interval == interval and index % scheduled.frequency == 0
        value = trainer.callback_metrics.get(scheduled.monitor)
        if scheduled.reduce_on_plateau and is_its_turn and value is not None:
            scheduled.scheduler.step(value)  # ty: ignore[invalid-argument-type]  # of a metric


def _counts(total: int, current: int, names: tuple[str, ...], **ahead: int) -> dict:
    """State of one of Lightning's trackers: in total, and in this epoch.

    Args:
        ahead: counters that are ahead of the others, by how much.
    """
    return {
        "total": {name: total + ahead.get(name, 0) for name in names},
        "current": {name: current + ahead.get(name, 0) for name in names},
    }


def start_epoch_anew(trainer: pl.Trainer) -> None:
    """For a run resumed between two epochs: the next one starts as in a run that was not stopped.

    Lightning marks all loops as restarting where max_steps is set, whatever their state says, and
    then leaves out the update of ReduceLROnPlateau at the end of the first epoch.
    """
    trainer.fit_loop._restarting = False
    if not trainer.fit_loop.epoch_loop.batch_progress.current.ready:
        trainer.fit_loop.epoch_loop.restarting = False


# RuntimeErrors by which Lightning refuses a configuration: EarlyStopping waits for a metric that is
# never logged, or the states of two callbacks would overwrite each other in a checkpoint.
REFUSALS = ("Early stopping conditioned", "Found more than one stateful callback")


@contextmanager
def refusals_in_one_line(key: str = "trainer") -> Generator[None, None, None]:
    """Turn what Lightning refuses as misconfigured into a ConfigError: one line, exit code 2.

    Args:
        key: Option that the line names.
    """
    try:
        yield
    except (MisconfigurationException, RuntimeError) as error:
        message = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and not message.startswith(REFUSALS):
            raise
        raise ConfigError.of(key, None, message) from error


def quiet() -> None:
    """Leaves of Lightning's lines the warnings that a person can act on, each printed once.

    Its loggers have a handler of their own, beside the one that Hydra gives the root logger.
    """
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.WARNING)
    for words in NOISE:
        warnings.filterwarnings("ignore", message=f".*{re.escape(words)}")


@contextmanager
def without_logging(module: pl.LightningModule) -> Generator[None, None, None]:
    """Make the module's log calls do nothing, while a step is repeated to find its fault.

    A second call would add to the means of what is logged, and with sync_dist=True wait for ranks
    that do not repeat the step.
    """

    def ignore(*_: Any, **__: Any) -> None:
        """Log nothing."""

    names = ("log", "log_dict")
    for name in names:
        module.__dict__[name] = ignore
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]


def ends_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether this micro-batch was the last of its optimizer step; epochs end on whole steps."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0

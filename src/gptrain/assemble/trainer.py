"""Lightning's Trainer, and the callbacks that every run has."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from hydra.utils import get_method
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from gptrain.assemble.parts import Lengths, build_target
from gptrain.assemble.resume import identity
from gptrain.launch.devices import Machine, native_precision
from gptrain.launch.process import this_process
from gptrain.lit.callbacks import (
    Checkpoints,
    CollectGarbage,
    Curves,
    Guarded,
    ProgressBar,
    StepLog,
    Stragglers,
)
from gptrain.lit.checkpoint_io import StoreIO
from gptrain.lit.environment import Ranks
from gptrain.lit.trainer import NoProfiler, leave_signals_to_us
from gptrain.resilience.lock import read_holder
from gptrain.resilience.status import CHECKPOINTS_NAME
from gptrain.resilience.store import CheckpointStore
from gptrain.resilience.watchdog import Guard

# Arguments of the Trainer that the batch arithmetic has already turned into steps.
TRAINER_KEYS = {
    "accelerator", "devices", "num_nodes", "precision", "max_epochs", "max_steps", "min_epochs",
    "accumulate_grad_batches", "limit_train_batches", "overfit_batches", "val_check_interval",
    "check_val_every_n_epoch",
}  # fmt: skip
SPELT_OUT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


def build_trainer(
    cfg: DictConfig,
    machine: Machine,
    strategy: Strategy,
    lengths: Lengths,
    guard: Guard | None,
    train: Dataset,
) -> pl.Trainer:
    """Lightning's Trainer over one long epoch: the run's steps, whatever the passes over the data.

    One epoch leaves one place where a run can be interrupted, the end of a step, and none where
    an epoch's counters and the data's position can disagree after a resume.
    """
    options = OmegaConf.to_container(_without(cfg.trainer, TRAINER_KEYS), resolve=True)
    make = get_method(options.pop("_target_"))
    process, fast = this_process(), bool(cfg.trainer.fast_dev_run)
    loggers = [] if fast else [build_target(node) for node in cfg.logger.values()]
    callbacks = [build_target(node) for node in cfg.callbacks.values() if node]
    trainer = make(
        **options,
        accelerator=machine.accelerator,
        devices=hand_devices(strategy, machine),
        num_nodes=machine.n_nodes,
        precision=resolve_precision(cfg, machine),
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=lengths.batch.accumulate,
        val_check_interval=lengths.validate_every * lengths.batch.accumulate,
        check_val_every_n_epoch=None,
        callbacks=[*callbacks, *build_callbacks(cfg, lengths, guard, train)],
        logger=loggers,
        plugins=[
            StoreIO(),
            Ranks(process.rank, process.local_rank, process.world_size, machine.n_local),
        ],
        profiler=build_target(cfg.profiler) if cfg.profiler else NoProfiler(),
        use_distributed_sampler=False,
        enable_checkpointing=False,
        default_root_dir=cfg.run_dir,
    )
    return leave_signals_to_us(trainer)


def hand_devices(strategy: Strategy, machine: Machine) -> int:
    """Gives the strategy its GPUs; returns what the Trainer is then to be told.

    Left to parse trainer.devices, Lightning counts the GPUs that this process sees, which under a
    launcher are more or fewer than the ranks of the node, and refuses.
    """
    if machine.accelerator != "cuda":
        return machine.n_local
    if isinstance(strategy, ParallelStrategy):
        strategy.parallel_devices = [machine.device(i) for i in range(machine.n_local)]
    return 1


def resolve_precision(cfg: DictConfig, machine: Machine) -> str:
    """Lightning's one name of it, "auto" decided."""
    precision = str(cfg.trainer.precision)
    return native_precision(machine) if precision == "auto" else SPELT_OUT.get(precision, precision)


def build_callbacks(
    cfg: DictConfig, lengths: Lengths, guard: Guard | None, train: Dataset
) -> list[pl.Callback]:
    """What every run needs, whatever the callbacks group holds."""
    bar = ProgressBar() if cfg.trainer.enable_progress_bar else None
    log = StepLog(cfg.trainer.log_every_n_steps, lengths.batch.global_batch_size, lengths.n_steps)
    keeps = cfg.checkpoint.name != "none" and not cfg.trainer.fast_dev_run and cfg.task == "fit"
    checkpoints = build_checkpoints(cfg, lengths, guard, train) if keeps else None
    compiles = cfg.model.compile != "none"
    guarded = Guarded(guard, checkpoints, compiles) if guard is not None else None
    alone = this_process().world_size == 1
    slow = None if alone else Stragglers(cfg.trainer.log_every_n_steps)
    found = (Curves(), log, bar, checkpoints, guarded, CollectGarbage(), slow)
    return [callback for callback in found if callback is not None]


def build_checkpoints(
    cfg: DictConfig, lengths: Lengths, guard: Guard | None, train: Dataset
) -> Checkpoints:
    """The callback that saves; long saves give signs of life."""
    store = CheckpointStore(
        Path(cfg.run_dir) / CHECKPOINTS_NAME,
        read_holder(cfg.run_dir)["run_id"],
        progress=guard.heartbeat.beat if guard is not None else None,
    )
    return Checkpoints(
        store,
        identity(cfg, lengths.batch.global_batch_size)
        | {"data": getattr(train, "fingerprint", None)},
        every_n_steps=cfg.checkpoint.every_n_steps,
        keep=cfg.checkpoint.keep,
        monitor=cfg.checkpoint.monitor,
        validate_every=lengths.validate_every,
        n_steps=lengths.n_steps,
        in_background=cfg.checkpoint.background,
    )


def _without(node: DictConfig, keys: set[str]) -> DictConfig:
    return OmegaConf.masked_copy(node, [key for key in node if key not in keys])

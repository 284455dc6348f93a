"""Builds Lightning's Trainer with its callbacks, loggers, devices and precision."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hydra.utils import get_method
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.strategies import ParallelStrategy, Strategy

from gptrain.assemble.load import build_target
from gptrain.assemble.resume import identity
from gptrain.checkpoints.lock import read_run_id
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core.lengths import RunLengths, phase_steps
from gptrain.core.schema import RunConfig
from gptrain.data.stream import UNKNOWN_LENGTH
from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.monitor import TrainingMonitor
from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.guard import Spikes, StepGuard
from gptrain.lit.lightning import disable_signals_and_autoresume
from gptrain.lit.loggers import JsonLinesLogger
from gptrain.lit.messages import misconfiguration_as_config_error
from gptrain.lit.rank_environment import RankEnvironment
from gptrain.lit.user_data import UserData
from gptrain.parallel.mesh import LONG_PHASE_S, gather
from gptrain.runtime.devices import RunDevices
from gptrain.runtime.process import this_process
from gptrain.runtime.watchdog import Guard


def build_trainer(
    cfg: RunConfig,
    devices: RunDevices,
    strategy: Strategy,
    lengths: RunLengths,
    guard: Guard,
    train: Any,
) -> pl.Trainer:
    """Build Lightning's Trainer with its callbacks and loggers.

    `lengths` replaces the limits of steps, epochs and training batches in the config. An epoch
    consists of complete optimizer steps.

    Args:
        cfg: Configuration of the run, with a precision other than "auto".
        devices: Devices of the run. On GPUs, those of this node are assigned to `strategy`.
        train: Training set, or the UserData of a LightningDataModule.

    Raises:
        ConfigError: If Lightning refuses an option, or a file that a part needs is missing. Other
            errors of the classes of callbacks, loggers and profiler pass unchanged.
    """
    options, make = cfg.trainer.arguments, get_method(cfg.trainer.target)
    callbacks, accumulate = _build_callbacks(cfg, lengths, guard, train), lengths.batch.accumulate
    loggers = [build_target(node.node(), f"logger.{name}") for name, node in cfg.logger.items()]
    is_users = isinstance(train, UserData)
    options |= place_options(devices, strategy) | {
        "precision": cfg.trainer.precision,
        # `lengths` has turned every limit of the run into optimizer steps.
        "max_epochs": -1 if len(train) >= UNKNOWN_LENGTH else lengths.n_epochs,
        "max_steps": -1 if lengths.n_steps is None else lengths.n_steps,
        "accumulate_grad_batches": accumulate,
        # A user's loaders may have batches left that do not fill an optimizer step.
        "limit_train_batches": lengths.epoch_steps * accumulate if is_users else None,
        "overfit_batches": 0.0,
        "val_check_interval": lengths.validate_every * accumulate,
        "check_val_every_n_epoch": None,
        "callbacks": callbacks,
        "enable_checkpointing": any(isinstance(part, Checkpoint) for part in callbacks),
        "logger": [*loggers, JsonLinesLogger(cfg.run_dir)],  # fast_dev_run calls none of them
        "profiler": build_target(cfg.profiler.node(), "profiler") if cfg.profiler else None,
        "use_distributed_sampler": is_users,
        "default_root_dir": cfg.run_dir,
    }
    for key in ("limit_val_batches", "limit_test_batches"):
        # TextDataModule has applied the limit. Lightning would take a fraction a second time, and
        # compare a number, which is that of each part of a mixture, with the sum of all parts.
        if not is_users and options.get(key):
            options[key] = None
    with misconfiguration_as_config_error("callbacks"):
        return disable_signals_and_autoresume(make(**options))


def place_options(devices: RunDevices, strategy: Strategy | str) -> dict[str, Any]:
    """Return the options of a Trainer that say on which devices and in which rank it runs.

    Args:
        strategy: Strategy of the Trainer, or Lightning's name of it. The GPUs of this node are
            assigned to an object.
    """
    is_gpu = devices.accelerator == "cuda"
    if is_gpu and isinstance(strategy, ParallelStrategy):
        strategy.parallel_devices = [devices.device(i) for i in range(devices.n_local)]
    return {
        "accelerator": devices.accelerator,
        # Lightning would compare the number with the GPUs that this process sees, which under some
        # launchers are not those of all ranks of the node.
        "devices": 1 if is_gpu else devices.n_local,
        "num_nodes": devices.n_nodes,
        "strategy": strategy,
        "plugins": [RankEnvironment(this_process())],
    }


# Callbacks


def _build_callbacks(
    cfg: RunConfig, lengths: RunLengths, guard: Guard, train: Any
) -> list[pl.Callback]:
    """Build the callbacks of the `callbacks` group and those that every run has.

    TrainingMonitor comes first: it checks the step before the others see it. Checkpoints comes
    last, because it saves the state of all others. The run folder must have been locked.
    """
    nodes = cfg.callbacks.items()
    own = [build_target(node.node(), f"callbacks.{name}") for name, node in nodes if node]
    has_bar = any(isinstance(callback, LightningBar) for callback in own)
    if cfg.trainer.enable_progress_bar and not has_bar:
        own.insert(0, ProgressBar())  # the end of the bar comes before what other callbacks print
    is_fit = cfg.task == "fit" and not cfg.trainer.fast_dev_run
    checkpoints = None
    if is_fit and cfg.checkpoint.name != "none":
        folder, rank = Path(cfg.run_dir) / CHECKPOINTS_NAME, this_process().rank
        store = CheckpointStore(folder, read_run_id(cfg.run_dir) or None, rank=rank, gather=gather)
        facts = identity(cfg) | {"warmup_steps": phase_steps(cfg, "warmup", lengths)}
        facts["data"] = getattr(train, "fingerprint", None)
        mirror = Mirror(cfg.checkpoint.mirror) if cfg.checkpoint.mirror else None
        checkpoints = Checkpoints(store, facts, cfg.checkpoint, cfg.objective, mirror, guard)
    spikes = Spikes(cfg.spike.sigma, cfg.spike.window)
    monitor = TrainingMonitor(
        cfg.trainer.log_every_n_steps,
        cfg.model.plain(),
        guard,
        StepGuard(cfg.on_nonfinite, cfg.on_spike, spikes, cfg.max_skips),
        checkpoints,
        compile_s=LONG_PHASE_S if cfg.model.compile != "none" else 0.0,
        seed=cfg.seed + 1,
    )
    return [part for part in (monitor, *own, checkpoints) if part is not None]

"""Builds Lightning's Trainer with its loggers, devices and precision."""

import lightning.pytorch as pl
from hydra.utils import get_method
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch.utils.data import Dataset

from gptrain.assemble.callbacks import build_callbacks
from gptrain.assemble.load import build_target
from gptrain.core.lengths import RunLengths
from gptrain.core.precision import full_name
from gptrain.core.schema import RunConfig
from gptrain.data.samples import len_of
from gptrain.data.stream import UNKNOWN_LENGTH
from gptrain.lit.lightning import RankEnvironment, disable_signals_and_autoresume
from gptrain.lit.loggers import JsonLinesLogger
from gptrain.lit.messages import misconfiguration_as_config_error
from gptrain.lit.user_data import UserData
from gptrain.runtime.devices import RunDevices, native_precision
from gptrain.runtime.process import this_process
from gptrain.runtime.watchdog import Guard


def build_trainer(
    cfg: RunConfig,
    devices: RunDevices,
    strategy: Strategy,
    lengths: RunLengths,
    guard: Guard,
    train: Dataset,
) -> pl.Trainer:
    """Build Lightning's Trainer. `lengths` replaces its limits of steps, epochs and batches.

    An epoch consists of complete optimizer steps.

    Args:
        cfg: Configuration of the run, with the precision from `resolve_precision`.
        devices: Devices of the run.
        strategy: Lightning strategy around the parallelism strategy.
        lengths: Batch arithmetic and number of steps, which replace the Trainer's own limits.
        guard: Watchdog of this rank.
        train: Training set, whose fingerprint is saved with each checkpoint.

    Raises:
        ConfigError: If Lightning refuses the combination of options and callbacks.
        KeyError: If the run saves checkpoints and its folder was never locked.
        Exception: Any other exception that the class of a callback, a logger or the profiler
            raises.
    """
    options, make = cfg.trainer.arguments, get_method(cfg.trainer.target)
    callbacks, accumulate = build_callbacks(cfg, lengths, guard, train), lengths.batch.accumulate
    is_users = isinstance(train, UserData)
    options |= {
        "accelerator": devices.accelerator,
        "devices": assign_devices(strategy, devices),
        "num_nodes": devices.n_nodes,
        "precision": cfg.trainer.precision,
        "strategy": strategy,
        "plugins": [RankEnvironment(this_process(), devices.n_local)],
        # `lengths` has turned every limit of the run into optimizer steps.
        "max_epochs": -1 if len_of(train) >= UNKNOWN_LENGTH else lengths.n_epochs,
        "max_steps": -1 if lengths.n_steps is None else lengths.n_steps,
        "accumulate_grad_batches": accumulate,
        # A user's loaders may have batches left that do not fill an optimizer step.
        "limit_train_batches": lengths.epoch_steps * accumulate if is_users else None,
        "overfit_batches": 0.0,
        "val_check_interval": lengths.validate_every * accumulate,
        "check_val_every_n_epoch": None,
        "callbacks": callbacks,
        "enable_checkpointing": any(isinstance(part, Checkpoint) for part in callbacks),
        "logger": build_loggers(cfg),
        "profiler": build_target(cfg.profiler.node(), "profiler") if cfg.profiler else None,
        "use_distributed_sampler": is_users,
        "default_root_dir": cfg.run_dir,
    }
    for key in ("limit_val_batches", "limit_test_batches"):
        # TextDataModule has applied the limit. Lightning would take the fraction a second time.
        if not is_users and isinstance(fraction := options.get(key), float) and fraction:
            options[key] = None
    with misconfiguration_as_config_error("callbacks"):
        return disable_signals_and_autoresume(make(**options))


def build_loggers(cfg: RunConfig) -> list[Logger]:
    """Build the loggers of the `logger` group, and the one that writes metrics.jsonl in every run.

    Under fast_dev_run a DummyLogger, which keeps nothing, replaces all of them: callbacks that log,
    such as LearningRateMonitor, refuse a Trainer without a logger.

    Args:
        cfg: Configuration of the run.

    Raises:
        Exception: Any exception that the class of a logger raises.
    """
    if cfg.trainer.fast_dev_run:
        return [DummyLogger()]
    loggers = [build_target(node.node(), f"logger.{name}") for name, node in cfg.logger.items()]
    return [*loggers, JsonLinesLogger(cfg.run_dir)]


def assign_devices(strategy: Strategy, devices: RunDevices) -> int:
    """Assign the GPUs of this node to a strategy, and return the value of the Trainer's `devices`.

    On GPUs that value is 1. Lightning would compare it with the number of GPUs that this process
    sees, which differs from the number of ranks of the node under some launchers. On any other
    accelerator it is the number of ranks of the node, and the strategy is not changed.

    Args:
        strategy: Lightning strategy. A ParallelStrategy of Lightning gets the GPUs of all local
            ranks; others are not changed.
        devices: Devices of the run.
    """
    if devices.accelerator != "cuda":
        return devices.n_local
    if isinstance(strategy, ParallelStrategy):
        strategy.parallel_devices = [devices.device(i) for i in range(devices.n_local)]
    return 1


def resolve_precision(cfg: RunConfig, devices: RunDevices) -> str:
    """Return the precision by its full name in Lightning, such as `bf16-mixed` for `bf16`.

    `auto` becomes the precision that the devices compute natively.

    Args:
        cfg: Configuration of the run.
        devices: Devices of the run.
    """
    precision = cfg.trainer.precision
    return native_precision(devices) if precision == "auto" else full_name(precision)

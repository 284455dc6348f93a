"""Lightning's Trainer, the callbacks that every run has, and what the run says of itself."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_method
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch.utils.data import Dataset

from gptrain.assemble.load import build_target
from gptrain.assemble.module import takes_net
from gptrain.assemble.optimizer import peak_lr
from gptrain.assemble.resume import SPELT_OUT, changed_options, identity
from gptrain.assemble.schedule import warmup_of
from gptrain.checkpoints.lock import read_holder
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.config.from_run import NOT_TAKEN, typed_again
from gptrain.core.lengths import RunLengths
from gptrain.core.schema import RunConfig
from gptrain.costs.optimizers import facts_of
from gptrain.costs.speed import DamagedMeasurementError
from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.monitor import TrainingMonitor
from gptrain.lit.callbacks.options import OptionTracker
from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.callbacks.unsupported import find_second_progress_bar, unsupported_reason
from gptrain.lit.lightning import (
    RankEnvironment,
    disable_signals_and_autoresume,
    misconfiguration_as_config_error,
    strategy_of,
)
from gptrain.lit.module import has_own_optimizer
from gptrain.lit.planned import plan_run
from gptrain.lit.report import Report
from gptrain.parallel.requirements import IncompatibleModelError
from gptrain.runtime.devices import RunDevices, native_precision
from gptrain.runtime.process import this_process
from gptrain.runtime.provenance import describe_run
from gptrain.runtime.watchdog import Guard

FP32_BYTES = 4
SIZES = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")  # told at the start


def build_trainer(
    cfg: RunConfig,
    machine: RunDevices,
    strategy: Strategy,
    lengths: RunLengths,
    guard: Guard | None,
    train: Dataset,
) -> pl.Trainer:
    """Lightning's Trainer over the run's steps, in epochs of whole steps."""
    options, make = cfg.trainer.arguments, get_method(cfg.trainer.target)
    callbacks = build_callbacks(cfg, lengths, guard, train)
    options |= {
        "accelerator": machine.accelerator,
        "devices": assign_devices(strategy, machine),
        "num_nodes": machine.n_nodes,
        "precision": resolve_precision(cfg, machine),
        "strategy": strategy,
        "plugins": [RankEnvironment(this_process(), machine.n_local)],
        # The batch arithmetic has turned all that limits a run into steps.
        "max_epochs": lengths.n_epochs,
        "max_steps": -1 if lengths.n_steps is None else lengths.n_steps,
        "accumulate_grad_batches": lengths.batch.accumulate,
        "limit_train_batches": None,
        "overfit_batches": 0.0,
        "val_check_interval": lengths.validate_every * lengths.batch.accumulate,
        "check_val_every_n_epoch": None,
        "callbacks": callbacks,
        "enable_checkpointing": any(isinstance(part, Checkpoint) for part in callbacks),
        "logger": build_loggers(cfg),
        "profiler": build_target(cfg.profiler.node()) if cfg.profiler else None,
        "use_distributed_sampler": False,
        "default_root_dir": cfg.run_dir,
    }
    with misconfiguration_as_config_error("callbacks"):
        return disable_signals_and_autoresume(make(**options))


def build_loggers(cfg: RunConfig) -> list[Logger]:
    """Return the loggers of a run; under fast_dev_run one that keeps nothing stands for them all.

    Callbacks that log, such as LearningRateMonitor, would refuse a Trainer without a logger.
    """
    if cfg.trainer.fast_dev_run:
        return [DummyLogger()] if cfg.logger else []
    return [build_target(node.node()) for node in cfg.logger.values()]


def assign_devices(strategy: Strategy, machine: RunDevices) -> int:
    """Gives the strategy its GPUs; returns what the Trainer is then to be told.

    Left to parse trainer.devices, Lightning counts the GPUs that this process sees, which under a
    launcher are more or fewer than the ranks of the node, and refuses.
    """
    if machine.accelerator != "cuda":
        return machine.n_local
    if isinstance(strategy, ParallelStrategy):
        strategy.parallel_devices = [machine.device(i) for i in range(machine.n_local)]
    return 1


def resolve_precision(cfg: RunConfig, machine: RunDevices) -> str:
    """Lightning's one name of it, "auto" decided."""
    precision = str(cfg.trainer.precision)
    return native_precision(machine) if precision == "auto" else SPELT_OUT.get(precision, precision)


def build_callbacks(
    cfg: RunConfig, lengths: RunLengths, guard: Guard | None, train: Dataset
) -> list[pl.Callback]:
    """Build the callbacks of the `callbacks` group and those that every run has.

    Steps comes first: it computes the values of a step that the other callbacks read, and checks
    the step before they see it. Checkpoints comes last, because it saves the state of the others.
    """
    named = {key: build_target(node.node()) for key, node in cfg.callbacks.items() if node}
    theirs = [*named.values()]
    has_bar = any(isinstance(callback, LightningBar) for callback in theirs)
    if cfg.trainer.enable_progress_bar and not has_bar:
        theirs.append(ProgressBar())
    keeps = cfg.checkpoint.name != "none" and not cfg.trainer.fast_dev_run and cfg.task == "fit"
    checkpoints = build_checkpoints(cfg, lengths, guard, train) if keeps else None
    steps = TrainingMonitor(
        cfg.trainer.log_every_n_steps,
        lengths,
        cfg.model.plain(),
        on_nonfinite=cfg.on_nonfinite,
        max_skips=cfg.max_skips,
        guard=guard,
        checkpoints=checkpoints,
        compiles=cfg.model.compile != "none",
        typed=typed_of_optimizer(cfg),
    )
    if checkpoints is None:
        return [steps, *theirs]
    typed = {
        f"callbacks.{key}": (named[key], node.node())
        for key, node in cfg.callbacks.items()
        if node is not None
    }
    return [steps, *theirs, OptionTracker(typed), checkpoints]


def check_callbacks(cfg: RunConfig, strategy: str) -> None:
    """Check that the run can have the callbacks of its config; none is built.

    Classes are judged here, before any process starts. What a function makes, and what a module
    returns from configure_callbacks, is judged by `TrainingMonitor` when the run begins.

    Raises:
        IncompatibleModelError: For a callback that a run with this strategy, loggers and progress
        bar cannot have.
    """
    nodes = ((name, node) for name, node in cfg.callbacks.items() if node)
    made = {f"callbacks.{name}._target_": get_method(node.target) for name, node in nodes}
    kinds = {key: kind for key, kind in made.items() if inspect.isclass(kind)}
    for key, kind in kinds.items():
        has_bar = cfg.trainer.enable_progress_bar is not False
        if reason := unsupported_reason(kind, strategy, bool(cfg.logger), has_bar):
            raise IncompatibleModelError(key, reason)
    if second := find_second_progress_bar(kinds.items()):
        raise IncompatibleModelError(*second)


def build_checkpoints(
    cfg: RunConfig, lengths: RunLengths, guard: Guard | None, train: Dataset
) -> Checkpoints:
    """The callback that saves; long saves give signs of life."""
    store = CheckpointStore(
        Path(cfg.run_dir) / CHECKPOINTS_NAME,
        read_holder(cfg.run_dir)["run_id"],
        progress=guard.heartbeat.beat if guard is not None else None,
    )
    facts = identity(cfg, lengths.batch.global_batch_size)
    facts["data"] = getattr(train, "fingerprint", None)
    facts["warmup_steps"] = warmup_of(cfg, lengths)
    optimizer = facts_of(cfg.optimizer.target, cfg.optimizer.arguments)
    bytes_of_each = FP32_BYTES + math.ceil(optimizer.bytes_per_parameter(FP32_BYTES))
    changed, objective = changed_options(cfg), cfg.objective
    mirror = Mirror(cfg.checkpoint.mirror) if cfg.checkpoint.mirror else None
    place = guard.heartbeat.folder / "failed" if guard is not None else None
    return Checkpoints(
        store, facts, cfg.checkpoint, bytes_of_each, changed, objective, mirror, place
    )


def build_report(
    cfg: RunConfig,
    machine: RunDevices,
    lengths: RunLengths,
    trainer: pl.Trainer,
    train: Dataset,
    module: pl.LightningModule,
) -> Report:
    """Describe the run in six lines: model, strategy, data if known, batch, plan, folder."""
    batch, info, arguments = lengths.batch, strategy_of(trainer).info, cfg.model.arguments
    uses_net = takes_net(type(module))
    if uses_net:
        model = [info.net_name, count_text(info.n_parameters)]
        model += [f"{key} {arguments[key]}" for key in SIZES if key in arguments]
    else:
        n_parameters = sum(parameter.numel() for parameter in module.parameters())
        model = [type(module).__name__, count_text(n_parameters)]
    devices = f"{machine.world_size} x {machine.accelerator}"
    strategy = [info.name, devices, f"precision {trainer.precision}"]
    if machine.accelerator == "cpu":
        strategy.append(f"{torch.get_num_threads()} threads")
    parts = [f"{batch.batch_size} x {batch.data_parallel_size} ranks"]
    if cfg.task == "fit":
        parts[0] += f" x {batch.accumulate} accumulated = {batch.global_batch_size} "
        is_text = lengths.unit == "tokens"
        parts[0] += f"sequences = {lengths.step_tokens} tokens" if is_text else "samples"
        parts[0] += " per step"
        n_steps = lengths.n_steps
        parts.append("no end" if n_steps is None else f"{n_steps} steps by {lengths.limit}")
        if not has_own_optimizer(module) and (lr := peak_lr(cfg, batch)) is not None:
            parts.append(f"lr {lr:g}")
    lines = {
        "model": " · ".join(model),
        "strategy": " · ".join(strategy),
    }
    if cfg.task == "fit" and (about := getattr(train, "about", None)):
        lines["data"] = about((lengths.n_steps or 0) * batch.global_batch_size)
    lines["batch"] = " · ".join(parts)
    facts: dict[str, Any] = describe_run(machine) if trainer.is_global_zero else {"overrides": []}
    options = cfg.plain() | {"typed": typed_options(cfg, facts)}
    planned = None
    is_planned = uses_net and cfg.task == "fit" and not cfg.trainer.fast_dev_run
    if trainer.is_global_zero and is_planned:
        precise = cfg.changed({"trainer.precision": str(trainer.precision)})
        try:
            lines["plan"], planned = plan_run(precise, info.name, lengths.sample_tokens, machine)
        except DamagedMeasurementError as error:
            lines["plan"] = f"none: {error}"
        except ValueError:
            pass  # of such a net or machine nothing is known
    lines["run"] = cfg.run_dir
    repeated_overrides = []
    if trainer.is_global_zero and HydraConfig.initialized():  # not in a process of the bench
        typed = HydraConfig.get().overrides
        repeated_overrides = typed_again([*typed.hydra, *typed.task], cfg.run_dir)
    return Report(lines, options, facts, planned, repeated_overrides)


def count_text(n_parameters: int) -> str:
    """Return a number of parameters in millions, or as it is where that would be 0.0."""
    is_small = n_parameters < 50_000
    return f"{n_parameters:,} parameters" if is_small else f"{n_parameters / 1e6:.1f} M parameters"


def typed_of_optimizer(cfg: RunConfig) -> dict[str, Any]:
    """Return key -> value of the overrides of the optimizer and the scheduler group.

    A value that is also an argument of the module is left out: the module's yaml may have taken it
    by a reference such as `lr: ${optimizer.lr}`.
    """
    if not HydraConfig.initialized():  # in a process of the bench
        return {}
    arguments, typed = list(cfg.module.arguments.values()), {}
    for line in HydraConfig.get().overrides.task:
        key, _, text = line.lstrip("+").partition("=")
        is_key = "." in key  # else the choice of a group
        value = cfg.value_of(key) if is_key else text
        if key.split(".")[0] in ("optimizer", "scheduler") and value not in arguments:
            typed[key] = value
    return typed


def typed_options(cfg: RunConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """Key -> value, of a group its choice, of the overrides that tell this run from another.

    Not where it lies; and in a sweep not what is the same in all of its jobs.
    """
    if not facts["overrides"]:
        return {}
    typed, same = {}, HydraConfig.get().job.config.override_dirname.exclude_keys
    for line in facts["overrides"]:
        key, _, text = line.lstrip("+").partition("=")
        if not {re.split("[./]", key)[0], key} & {*NOT_TAKEN, *same} and key[0] != "~":
            value = cfg.value_of(key)
            typed[key] = value if isinstance(value, int | float | str) else text
    return typed

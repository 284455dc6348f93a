"""From the config to the callbacks of the Trainer."""

import math
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from torch.utils.data import Dataset

from gptrain.assemble.load import build_target
from gptrain.assemble.resume import changed_options, identity
from gptrain.assemble.schedule import warmup_of
from gptrain.checkpoints.lock import read_run_id
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.timeline import Timeline
from gptrain.core.lengths import RunLengths
from gptrain.core.schema import RunConfig
from gptrain.costs.choice import optimizer_states
from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.garbage import QuietCollector
from gptrain.lit.callbacks.monitor import TrainingMonitor
from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.guard import Spikes, StepGuard
from gptrain.runtime.process import this_process
from gptrain.runtime.watchdog import Guard

FP32_BYTES = 4


def build_callbacks(
    cfg: RunConfig, lengths: RunLengths, guard: Guard, train: Dataset
) -> list[pl.Callback]:
    """Build the callbacks of the `callbacks` group and those that every run has.

    TrainingMonitor comes first: it computes the values of a step that the other callbacks read, and
    checks the step before they see it. Checkpoints comes last, because it saves the state of all
    other callbacks. For a training, rank 0 adds the first line of this start to timeline.jsonl in
    the run folder.

    Args:
        cfg: Configuration of the run.
        lengths: Batch arithmetic and number of steps.
        guard: Watchdog of this rank.
        train: Training set, whose fingerprint is saved with each checkpoint.

    Returns:
        The callbacks in the order in which the Trainer calls them. Checkpoints is left out of an
        evaluation, under fast_dev_run and under checkpoint=none.

    Raises:
        KeyError: If the run saves checkpoints and its folder was never locked.
        OSError: If timeline.jsonl cannot be written.
        Exception: Any exception that the class of a callback raises. Those of `build_checkpoints`
            pass, too.
    """
    own = [
        build_target(node.node(), f"callbacks.{name}")
        for name, node in cfg.callbacks.items()
        if node is not None
    ]
    has_bar = any(isinstance(callback, LightningBar) for callback in own)
    if cfg.trainer.enable_progress_bar and not has_bar:
        own.insert(0, ProgressBar())  # the end of the bar comes before what other callbacks print
    is_fit = cfg.task == "fit" and not cfg.trainer.fast_dev_run
    keeps = is_fit and cfg.checkpoint.name != "none"
    is_recorded = is_fit and this_process().rank == 0
    timeline = Timeline(Path(cfg.run_dir) if is_recorded else None)
    checkpoints = build_checkpoints(cfg, lengths, guard, train, timeline) if keeps else None
    monitor = TrainingMonitor(
        cfg.trainer.log_every_n_steps,
        lengths,
        cfg.model.plain(),
        guard,
        timeline,
        checkpoints=checkpoints,
        compiles=cfg.model.compile != "none",
    )
    spikes = Spikes(cfg.spike.sigma, cfg.spike.window)
    step_guard = StepGuard(cfg.on_nonfinite, cfg.on_spike, spikes, cfg.max_skips)
    last = [] if checkpoints is None else [checkpoints]
    return [monitor, step_guard, QuietCollector(), *own, *last]


def build_checkpoints(
    cfg: RunConfig, lengths: RunLengths, guard: Guard, train: Dataset, timeline: Timeline
) -> Checkpoints:
    """Build the callback that saves checkpoints.

    The run folder must have been locked: the identity of the run is read from the record of its
    lock. A save reports progress to the watchdog, so that a long save is not taken for a hang.

    Args:
        cfg: Configuration of the run.
        lengths: Batch arithmetic and number of steps.
        guard: Watchdog of this rank.
        train: Training set, whose fingerprint is saved with each checkpoint.
        timeline: Record of the phases of this start.

    Raises:
        ValueError, ImportError: If the protocol of `checkpoint.mirror` is unknown, or its package
            is missing.
        ConfigError: If the warm-up is a fraction of a run of unknown length.
    """
    store = CheckpointStore(
        Path(cfg.run_dir) / CHECKPOINTS_NAME,
        read_run_id(cfg.run_dir) or None,
        progress=guard.beat,
    )
    facts = identity(cfg, cfg.batch_plan(lengths.batch.data_parallel_size).global_batch_size)
    facts["data"] = getattr(train, "fingerprint", None)
    facts["warmup_steps"] = warmup_of(cfg, lengths)
    n_states = max(optimizer_states(cfg.optimizer.target, cfg.optimizer.arguments))
    state_bytes = math.ceil(FP32_BYTES * n_states)
    mirror = Mirror(cfg.checkpoint.mirror) if cfg.checkpoint.mirror else None
    return Checkpoints(
        store,
        facts,
        cfg.checkpoint,
        state_bytes,
        changed_options(cfg),
        cfg.objective,
        mirror,
        timeline,
    )

"""What of Lightning's loop a run does itself, or does without.

Added to a bare loop's step by Lightning 2.6.6: 0.75 ms as it comes, 0.35 ms here; measured once on
one quiet core.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

# Hooks that Lightning calls on the module and on every callback in every step, in a context of the
# profiler and with a few look-ups each; it passes over those that are None.
STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class NoProfiler(PassThroughProfiler):
    """The profiler of a run that is not profiled: 60 contexts a step that cost nothing."""

    nothing = nullcontext()

    def profile(self, action_name: str) -> nullcontext:
        return self.nothing


class FetchClock:
    """Adds up how long the device waits for its batches.

    A CPU waits for the whole of a fetch. A GPU still has all that it was given before: only where
    it came to the end of that is the fetch counted, which reads an event and waits for nothing.

    Attributes:
        waited_s: so far, in seconds; of a GPU an upper bound.
    """

    def __init__(self, trainer: pl.Trainer):
        self.waited_s = self.started_s = 0.0
        self.on_gpu = trainer.strategy.root_device.type == "cuda"
        self.given: torch.cuda.Event | None = None
        loop = trainer.fit_loop.epoch_loop
        self.profiled = loop._on_before_fetch, loop._on_after_fetch
        loop._on_before_fetch, loop._on_after_fetch = self.start, self.stop

    def start(self) -> None:
        """Called before the loop asks for a batch."""
        self.profiled[0]()
        if self.on_gpu:
            self.given = torch.cuda.current_stream().record_event()
        self.started_s = time.perf_counter()

    def stop(self) -> None:
        """Called once it has it."""
        fetched_s = time.perf_counter() - self.started_s
        if self.given is None or self.given.query():
            self.waited_s += fetched_s
        self.profiled[1]()


def leave_signals_to_us(trainer: pl.Trainer) -> pl.Trainer:
    """Switches off Lightning's signal handlers and its broadcast before every micro-batch.

    Its SIGTERM handler calls a collective inside the signal handler, exits with code 0 and saves
    nothing; to tell the ranks it then broadcasts, and waits for, one number per micro-batch
    (Lightning 2.6.6, `_TrainingEpochLoop._broadcast_sigterm_tensor`). `Guarded` does this work.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return trainer


def trim_step(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Leaves out of each micro-step what is found to do nothing in this run.

    Batches here are tuples of tensors, and steps are logged by StepLog: so the signature of
    `training_step` need not be read each time, nor a batch searched for tensors; and results are
    gathered only where something was logged by `self.log`.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    loop._build_kwargs = lambda kwargs, batch, batch_idx: {"batch": batch, "batch_idx": batch_idx}

    def where_logged(method):
        def call() -> None:
            if loop._results or trainer.state.stage is not RunningStage.TRAINING:
                method()

        return call

    connector.on_batch_end = where_logged(connector.on_batch_end)
    connector.update_train_step_metrics = where_logged(connector.update_train_step_metrics)
    for part in (module, *trainer.callbacks):
        base = pl.LightningModule if part is module else pl.Callback
        for hook in STEP_HOOKS:
            if not is_overridden(hook, part, base):
                setattr(part, hook, None)
    transfers = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    if not any(is_overridden(hook, module, pl.LightningModule) for hook in transfers):
        module._on_before_batch_transfer = lambda batch, dataloader_idx=0: batch
        module._apply_batch_transfer_handler = to_device


def to_device(
    batch: tuple[Tensor, ...], device: torch.device | None = None, dataloader_idx: int = 0
) -> tuple[Tensor, ...]:
    """The batch on the device; from page-locked memory without waiting for the copy."""
    return tuple(part.to(device, non_blocking=True) for part in batch)

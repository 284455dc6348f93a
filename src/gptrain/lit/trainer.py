"""What around Lightning's loop a run does itself, or does without."""

from __future__ import annotations

import time
from contextlib import nullcontext

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import PassThroughProfiler


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

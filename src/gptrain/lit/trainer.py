"""Two things of Lightning's loop that a run does itself."""

from __future__ import annotations

import lightning.pytorch as pl


def leave_signals_to_us(trainer: pl.Trainer) -> pl.Trainer:
    """Switches off Lightning's signal handlers and its broadcast before every micro-batch.

    Its SIGTERM handler calls a collective inside the signal handler, exits with code 0 and saves
    nothing; to tell the ranks it then broadcasts, and waits for, one number per micro-batch
    (Lightning 2.6.6, `_TrainingEpochLoop._broadcast_sigterm_tensor`). `StopAtStep` does this work.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return trainer

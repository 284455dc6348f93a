"""Tells the watchers that the run gets on, and ends it where it was asked to stop."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.module import LanguageModel
from gptrain.lit.vote import Vote
from gptrain.resilience.status import Preempted, shorten
from gptrain.resilience.watchdog import Guard

COMPILING_S = 3600.0  # what a first step may take where it compiles


class Guarded(Callback):
    """Beats at every batch; and asks all ranks whether any of them was told to stop.

    All ranks leave at the same step, saved. The question of one step is answered at the next, so
    that no rank waits for the answer. Before the first step and in an evaluation there is nothing
    to save: a rank that was told leaves by itself, and the job ends with it.

    Args:
        guard: of this rank.
        checkpoints: what saves the run; None where nothing is kept.
        compiles: the first step of each kind may take long.
    """

    def __init__(self, guard: Guard, checkpoints: Checkpoints | None, compiles: bool = False):
        self.guard, self.checkpoints = guard, checkpoints
        self.first_s = COMPILING_S if compiles else 0.0
        self.stops = Vote()

    def on_fit_start(self, trainer: Trainer, module: LanguageModel) -> None:
        self.guard.leave_if_asked()

    def on_train_start(self, trainer: Trainer, module: LanguageModel) -> None:
        self.guard.leave_if_asked()
        self.guard.heartbeat.beat(trainer.global_step, "train", allow_s=self.first_s)

    def on_train_batch_end(
        self, trainer: Trainer, module: LanguageModel, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.guard.heartbeat.beat(trainer.global_step, "train")
        if not trainer.fit_loop._should_accumulate():
            self._leave_if_asked(trainer, module)

    def on_validation_start(self, trainer: Trainer, module: LanguageModel) -> None:
        self.guard.heartbeat.beat(phase="validate", allow_s=self.first_s)

    def on_validation_batch_end(self, trainer: Trainer, module: LanguageModel, *_: Any) -> None:
        self.guard.heartbeat.beat(phase="validate")
        if trainer.state.fn == "fit":
            self._leave_if_asked(trainer, module)
        else:
            self.guard.leave_if_asked()

    def on_validation_end(self, trainer: Trainer, module: LanguageModel) -> None:
        self.guard.heartbeat.beat(phase="train")

    def on_test_batch_end(self, trainer: Trainer, module: LanguageModel, *_: Any) -> None:
        self.guard.heartbeat.beat(phase="test")
        self.guard.leave_if_asked()

    def on_train_end(self, trainer: Trainer, module: LanguageModel) -> None:
        self.guard.heartbeat.beat(phase="end")
        self.stops.close()  # nobody leaves a collective behind

    def on_exception(self, trainer: Trainer, module: LanguageModel, exception: Exception) -> None:
        if trainer.training and trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            step, rank = trainer.global_step, trainer.global_rank
            samples = trainer.datamodule.step_samples(step, rank)
            self.guard.doing = f"step {step}, of whose samples rank {rank} has {shorten(samples)}"

    def _leave_if_asked(self, trainer: Trainer, module: LanguageModel) -> None:
        if not self.stops.any(bool(self.guard.stop)):
            return
        if self.checkpoints is None:
            raise Preempted
        self.checkpoints.save(trainer, at_once=True)
        raise Preempted(trainer.global_step)

"""Tells the watchers that the run gets on, and ends it where it was asked to stop."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.vote import Vote
from gptrain.lit.lightning import ends_step
from gptrain.resilience.status import Preempted, shorten
from gptrain.resilience.watchdog import Guard

COMPILING_S = 3600.0  # what a first step may take where it compiles


class Guarded(Callback):
    """Beats at every batch; and asks all ranks whether any of them was told to stop.

    All ranks leave at the same step, saved. The question of one step is answered at the next, so
    that no rank waits for the answer; a rank leaves when the next hook is called, so that the step
    is logged. Before the first step and in an evaluation there is nothing to save: a rank that was
    told leaves by itself, and the job ends with it.

    Args:
        guard: of this rank.
        checkpoints: what saves the run; None where nothing is kept.
        compiles: the first step of each kind may take long.
    """

    def __init__(self, guard: Guard, checkpoints: Checkpoints | None, compiles: bool = False):
        self.guard, self.checkpoints = guard, checkpoints
        self.first_s = COMPILING_S if compiles else 0.0
        self.stops, self.stopping = Vote(), False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.guard.leave_if_asked()
        self.guard.heartbeat.beat(trainer.global_step, "train", allow_s=self.first_s)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._leave(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.guard.heartbeat.beat(trainer.global_step, "train")
        if ends_step(trainer, batch_idx):
            self._ask()

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.guard.heartbeat.beat(phase="validate", allow_s=self.first_s)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._leave(trainer)

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.guard.heartbeat.beat(phase="validate")
        if trainer.state.fn != "fit":
            self.guard.leave_if_asked()
        elif not trainer.sanity_checking:
            self._ask()
            self._leave(trainer)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.guard.heartbeat.beat(phase="train")

    def on_test_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.guard.heartbeat.beat(phase="test")
        self.guard.leave_if_asked()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.guard.heartbeat.beat(phase="end")
        self.stops.close()  # nobody leaves a collective behind

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: Exception) -> None:
        if trainer.training and trainer.fit_loop.batch_idx >= 0:
            step, rank = trainer.global_step, trainer.global_rank
            samples = trainer.datamodule.step_samples(step, rank)
            self.guard.doing = f"step {step}, of whose samples rank {rank} has {shorten(samples)}"

    def _ask(self) -> None:
        if self.stops.ask(bool(self.guard.stop)):
            self.stopping = True
            if self.checkpoints is not None:
                self.checkpoints.stopping = True

    def _leave(self, trainer: Trainer) -> None:
        """Raises: Preempted, once all ranks know; the step is saved.

        After the last step it is saved only: what is left is the validation, which is the end.
        """
        if not self.stopping or (trainer.validating and acts_on_validation(trainer)):
            return
        if self.checkpoints is None:
            raise Preempted
        if self.checkpoints.saved[0] < trainer.global_step:
            self.checkpoints.save(trainer, validated=False)  # it is being validated
        if trainer.global_step != trainer.max_steps:
            raise Preempted(trainer.global_step)


def acts_on_validation(trainer: Trainer) -> bool:
    """Whether a callback or the module does at a validation's start what its end has to undo.

    As WeightAveraging, which validates its averages: such a validation is not left in its middle.
    """
    hooks = ("on_validation_start", "on_validation_epoch_start")
    parts = (*trainer.callbacks, trainer.lightning_module)
    theirs = [part for part in parts if not type(part).__module__.startswith("gptrain.")]
    return any(is_overridden(hook, part) for part in theirs for hook in hooks)

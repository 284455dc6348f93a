"""Checkpoints, the callback that saves a run so that it can resume bit for bit from every save."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from gptrain.checkpoints.manifest import read_manifest
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.status import PreemptedError
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.tensors import Tensors
from gptrain.core.schema import CheckpointConfig
from gptrain.lit.callbacks import resume
from gptrain.lit.callbacks.vote import Vote, may_vote_in_validation
from gptrain.lit.lightning import ends_epoch, ends_step, is_validated, loop_state_after, strategy_of
from gptrain.parallel.mesh import LONG_PHASE_S, wait_for_rank_0
from gptrain.runtime.watchdog import Guard

# Number of parameters. A smaller net is saved in less than 0.2 s, and before the next step.
_BACKGROUND_PARAMETERS = 1 << 22


@dataclass(eq=False)
class Checkpoints(Checkpoint):
    """Callback that saves the run before each validation, at intervals, and when it ends.

    A step is saved before its validation, and a run that resumes from it repeats this validation,
    with the same values. The metrics are written into the manifest of the checkpoint when they are
    known; until then it cannot be the best one. A step that ends an epoch and has no validation is
    saved, if it is due, at the start of the next epoch: a run cannot resume within the hooks of an
    epoch's end.

    A save after a step contains the state of all callbacks and of the module after this step, and
    Lightning calls this callback after all others. After each step the ranks vote on saving and on
    stopping, so that all of them do it at the same step.

    Attributes:
        store: Checkpoints of the run.
        identity: Config key -> value for all keys that a resumed run must not change. Every
            manifest contains it.
        options: `checkpoint` group of the config, such as the intervals and the monitored metric.
        objective: Logged name by which a sweep compares its jobs.
        mirror: Mirror that copies each checkpoint while training continues, or None.
        guard: Watchdog of this rank. It counts the time of each phase, and has the flag that a stop
            signal sets.
        saved_step: Newest step that was saved, or that the run has resumed from. 0 before.
    """

    store: CheckpointStore
    identity: dict[str, Any]
    options: CheckpointConfig
    objective: str
    mirror: Mirror | None
    guard: Guard
    saved_step: int = 0

    def __post_init__(self) -> None:
        self.store.on_commit = self._prune
        self._is_ending = False  # `trainer.should_stop` was set within the step
        self._votes = Vote(3)  # votes on the next three attributes
        self._stopping = False  # end the run when its step is saved
        self._time_is_up = False  # save, because `every_minutes` have passed
        self._is_written = False  # all ranks have written their files of a save in the background
        # Config key -> name that the first validation must log. Empty after the first validation.
        self._expected = {"checkpoint.monitor": self.options.monitor, "objective": self.objective}
        self._loaded: dict[str, Any] | None = None  # resume.STATE of the checkpoint to resume from
        self._only_validates = False  # the run resumes to repeat the validation of its last step
        self._interval_start_s = 0.0  # start of the every_minutes interval, used on rank 0 only

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add Lightning's loop counters to a checkpoint of gptrain from which a fit resumes.

        All ranks must call it. Does nothing for a file of Lightning, or outside of a fit.
        """
        if "rng" not in checkpoint or trainer.state.fn != "fit":
            return
        # Keep only these entries, so that the tensors of the checkpoint can be freed.
        self._loaded = {key: checkpoint.get(key) for key in resume.STATE}
        step = self.saved_step = checkpoint["global_step"]
        saved = read_manifest(Path(str(trainer.ckpt_path)))
        metrics, self._changed = saved.metrics, resume.changed_options(self.identity, saved.config)
        is_last = step == trainer.max_steps
        self._only_validates = is_last and trainer.enable_validation and not metrics
        if is_last:
            self._loaded["logged"] |= metrics
        repeats_validation = is_validated(trainer, step) or self._only_validates
        checkpoint["loops"] = {"fit_loop": loop_state_after(trainer, step, repeats_validation)}
        if self._only_validates:
            # Lightning's loop would end without the validation, because no step is left.
            trainer.fit_loop.epoch_loop.max_steps = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the logged values of the checkpoint, also if no step is left to train."""
        for name, value in self._loaded["logged"].items() if self._loaded else ():
            trainer.callback_metrics[name] = torch.tensor(value, dtype=torch.float64)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore what Lightning does not, if the run resumes (`resume.resume_run`).

        Sets checkpoints of later steps aside, on rank 0, because the run has gone back before them.
        """
        if self._only_validates:
            trainer.val_check_batch = 1
        if self._loaded is not None:
            resume.resume_run(trainer, self._loaded, self._changed)
            self._loaded = None
        if trainer.is_global_zero:
            self.store.set_aside_after(trainer.global_step)
        self._interval_start_s = monotonic()

    def end_micro_step(self, trainer: Trainer, batch_idx: int) -> None:
        """Vote, finish a save that all ranks have written, and save the step if it is due.

        Collective. `TrainingMonitor` lets it run after `on_train_batch_end` of all callbacks and of
        the module. A step before a validation or the end of an epoch is saved by a later hook.
        """
        if not ends_step(trainer, batch_idx):
            # Lightning would end the run within the step, for a callback such as its Timer.
            self._is_ending, trainer.should_stop = self._is_ending or trainer.should_stop, False
            return
        trainer.should_stop |= self._is_ending
        self._vote(trainer)
        # A vote that began before the newest save is known up to two steps later.
        if self._is_written and trainer.global_step > self.saved_step + 1:
            self.finish(trainer)
        if not ends_epoch(trainer) and not is_validated(trainer, trainer.global_step):
            self.save_if_due(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Vote during a validation of a fit, and end the run if the ranks have agreed to stop."""
        is_of_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_of_fit and may_vote_in_validation(trainer):
            self._vote(trainer)
            self.leave_if_saved(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the logged values, without perf/*, into the manifest of the step's checkpoint.

        Does nothing after a sanity check and outside of a fit. The first validation warns of
        missing metrics. A run that resumed only to validate ends.
        """
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        trainer.should_stop |= self._only_validates
        if trainer.is_global_zero:
            metrics = resume.reproducible_metrics(trainer)
            resume.warn_about_missing(self._expected, metrics)
            self._expected = {}
            self.store.set_metrics(trainer.global_step, metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if it is not saved yet, and finish a background save. Collective."""
        self._votes.close()
        self.save(trainer)
        self.finish(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the mirror, if any, up to date on rank 0, while all ranks wait. All must call it.

        A failure is a warning. A launcher kills the job soon after the first rank exits.
        """
        if (mirror := self.mirror) is None:
            return
        with self.guard.during("mirror", LONG_PHASE_S):
            # The update also copies what an earlier, killed start did not copy.
            wait_for_rank_0(lambda: mirror.update(self.store).result(), trainer.global_rank)

    def save(self, trainer: Trainer) -> None:
        """Save the current step, unless it is saved already. All ranks must call this method.

        With `checkpoint.background` a large save is written in the background, except at the end of
        the run, and becomes a checkpoint when `finish` is called.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files of this save or of
                the one before. The earlier checkpoints are intact.
            RuntimeError: In the same way, for another error, as a state that cannot be pickled.
            RefusedStepError, DataError: Those of `StepGuard.read`, if the last step ends the run.
                Nothing is saved then.
        """
        step = trainer.global_step
        self._time_is_up = False
        self._interval_start_s = monotonic()
        if step == self.saved_step:
            return
        self.saved_step = step
        n_parameters = sum(p.numel() for p in strategy_of(trainer).full_net.parameters())
        is_last = self._stopping or step == trainer.max_steps
        waits = is_last or n_parameters < _BACKGROUND_PARAMETERS or not self.options.background

        def write(tensors: Mapping[str, Tensors], rest: dict[str, Any]) -> None:
            """Save what Lightning has collected, and what an exact resume needs in addition."""
            resume.add_state(trainer, rest)
            about = {"config": self.identity, "phase_s": self.guard.phase_s}
            self.store.save(step, tensors, rest, in_background=not waits, **about)

        with self.guard.during("save", LONG_PHASE_S):
            trainer.save_checkpoint(self.store.folder, weights_only=False, storage_options=write)

    def ranking(self) -> list[Path]:
        """Return the folders of the checkpoints that have the monitored metric, the best first.

        The checkpoints are not verified. Raises an OSError if their folder cannot be read.
        """
        return self.store.ranking(self.options.monitor, self.options.mode)

    def finish(self, trainer: Trainer) -> None:
        """Wait for a save in the background, if any, and turn it into a checkpoint. Collective.

        Raises a SaveFailedError or a RuntimeError on all ranks if the save of a rank failed.
        """
        with self.guard.during("save", LONG_PHASE_S):
            self.store.finish()

    def save_if_due(self, trainer: Trainer) -> None:
        """Save the current step if it is due also without a validation. Collective.

        `TrainingMonitor` calls it for the last step of the epoch before, ahead of
        `on_train_epoch_start` of any other callback. Raises the errors of `save`.
        """
        is_interval_over = trainer.global_step % (self.options.every_n_steps or math.inf) == 0
        is_end = trainer.should_stop and not trainer.enable_validation
        if is_interval_over or self._time_is_up or self._stopping or is_end:
            self.save(trainer)

    def leave_if_saved(self, trainer: Trainer) -> None:
        """Raise a PreemptedError if the ranks have agreed to stop and the step is saved.

        All ranks must call it. A run whose last step is done ends as usual.
        """
        step = trainer.global_step
        if self._stopping and step == self.saved_step and step != trainer.max_steps:
            self.finish(trainer)
            self.on_fit_end(trainer, trainer.lightning_module)  # is not called after an error
            raise PreemptedError(step)

    def _vote(self, trainer: Trainer) -> None:
        """Vote on stopping and on saving, and apply the results of the previous vote."""
        every_s = 60 * (self.options.every_minutes or math.inf)
        is_over = trainer.is_global_zero and monotonic() - self._interval_start_s >= every_s
        if is_over:
            self._interval_start_s = monotonic()
        save = self.store.unfinished
        is_missing = save is None or not save.written.done()
        stops, saves, is_missing = self._votes.ask(bool(self.guard.stop), is_over, is_missing)
        self._stopping |= stops
        self._time_is_up |= saves
        self._is_written = not is_missing

    def _prune(self) -> None:
        """Remove all checkpoints except the newest ones and the best one, also from the mirror."""
        self.store.prune(self.options.keep, protect=self.ranking()[:1])
        if self.mirror is not None:
            self.mirror.update(self.store)

"""Checkpoints, the callback that saves a run so that it can resume bit for bit from every save."""

import logging
from collections import deque
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from gptrain.checkpoints.manifest import folder_name
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.rng import capture
from gptrain.checkpoints.status import PreemptedError
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.timeline import Timeline
from gptrain.core import labels
from gptrain.core.errors import first_line
from gptrain.core.schema import CheckpointConfig
from gptrain.lit.callbacks.resume import (
    STATE,
    add_state,
    reproducible_metrics,
    restore_logged,
    resume_run,
    warn_about_missing,
)
from gptrain.lit.callbacks.salvage import allow_amendment, may_save
from gptrain.lit.callbacks.saves import amend_checkpoint, write_checkpoint
from gptrain.lit.callbacks.vote import Vote
from gptrain.lit.lightning import (
    ends_epoch,
    ends_step,
    is_validated,
    loop_state_after,
    strategy_of,
)
from gptrain.parallel.mesh import LONG_PHASE_S, gather, wait_for_rank_0

log = logging.getLogger(__name__)
# Smaller saves take less than 0.2 s. They are finished before the next step starts.
BACKGROUND_BYTES = 1 << 26
WRITING_S = LONG_PHASE_S  # time for which the other ranks wait while rank 0 writes, in seconds


class SavedStep(NamedTuple):
    """An optimizer step that was saved.

    Attributes:
        step: Number of optimizer steps done.
        validated: Whether the validation and the epoch-end hooks that follow the step were done
            before the save. If False, a resumed run repeats them.
    """

    step: int
    validated: bool


class Checkpoints(Checkpoint):
    """Callback that saves the run at each validation, at configured intervals, and when it ends.

    A step with a validation is saved before its validation, so that a validation that fails costs
    no training. Afterwards the checkpoint is amended: the metrics and the states of callbacks that
    the validation has changed are added to it. Until then the checkpoint has no metric and cannot
    be the best one. A step that ends an epoch and has no validation is saved, if it is due, after
    the hooks of the epoch's end.

    Lightning calls this callback after all other callbacks, so that a save contains their state
    after this step. If training fails between two saves, the newest complete step is saved,
    provided that all ranks have failed after the same step.

    Args:
        store: Checkpoints of the run.
        identity: Config key -> value for all keys that a resumed run must not change. Every
            manifest contains it.
        options: `checkpoint` group of the config, such as the intervals and the monitored metric.
        parameter_bytes: Bytes of a save per parameter: the parameter and its optimizer states.
        changed: Names of the optimizer options, such as `lr`, that take their value from the
            current config when the run resumes. All others keep their value in the checkpoint.
        objective: Logged name by which a sweep compares its jobs.
        mirror: Mirror that copies each checkpoint while training continues. All ranks wait for the
            last copy before they exit. None if there is no mirror.
        timeline: Record of the phases of this start.

    Attributes:
        stopping: Whether the ranks have agreed to stop. Set by `TrainingMonitor`.
        time_is_up: Whether the ranks have agreed to save, because `every_minutes` have passed since
            the last save. Set by `TrainingMonitor`.
        saved: Newest step that was saved.
    """

    def __init__(
        self,
        store: CheckpointStore,
        identity: dict[str, Any],
        options: CheckpointConfig,
        parameter_bytes: int,
        changed: tuple[str, ...],
        objective: str,
        mirror: Mirror | None,
        timeline: Timeline,
    ):
        self.store = store
        self.identity = identity
        self.options = options
        self.parameter_bytes = parameter_bytes
        self.changed = frozenset(changed)
        self.mirror = mirror
        if mirror is not None:
            store.on_commit = lambda: mirror.update(store)
        self.timeline = timeline
        self.stopping = False
        self.time_is_up = False
        self.saved = SavedStep(0, True)
        self._needed_bytes = 0  # estimated size of one save
        # Config key -> logged name that the first validation must log, and the effect if it does
        # not. Empty after the first validation.
        self._expected_metrics = {
            "checkpoint.monitor": (options.monitor, "the newest checkpoint is the best"),
            "objective": (objective, "a sweep finds no best run"),
        }
        self._metrics: dict[str, float] | None = None  # metrics of a validation, not yet saved
        self._loaded: dict[str, Any] | None = None  # STATE of the checkpoint to resume from
        self._only_validates = False  # the run resumes to repeat the validation of its last step
        self._completed_step = 0  # newest step whose validation and epoch-end hooks are done
        # RNG states after the last two steps, each with the number of the steps done
        self._rng: deque[tuple[int, dict[str, Any]]] = deque(maxlen=2)
        self._is_salvaging = False  # an error has ended training, and its last step is being saved
        self._interval_start_s = 0.0  # start of the every_minutes interval, used on rank 0 only
        self._writing_vote = Vote()  # whether any rank is still writing a background save

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check on rank 0, before training starts, that the disk has space for two checkpoints.

        Two must fit, because a checkpoint is removed only after the next one is complete. Does
        nothing before an evaluation.

        Raises:
            SaveFailedError: On rank 0, if they do not fit.
        """
        if stage != "fit":
            return
        self._needed_bytes = self.parameter_bytes * strategy_of(trainer).n_saved
        if trainer.is_global_zero:
            self.store.check_space(2 * self._needed_bytes)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add Lightning's loop counters to a checkpoint of gptrain from which a fit resumes.

        A checkpoint of gptrain has none. They are computed from its step, so that the run may
        resume on another number of ranks. The step also becomes `saved`, and the state that
        `on_train_start` restores is kept. If only the validation of the last step is left, the
        limit of Lightning's loop is removed, because the loop would end without this validation.

        Does nothing in an evaluation, and for a file of a Lightning callback such as
        ModelCheckpoint, which has counters.
        """
        if "validated" not in checkpoint or trainer.state.fn != "fit":
            return
        # Keep only these entries, so that the tensors of the checkpoint can be freed.
        self._loaded = {key: checkpoint[key] for key in STATE}
        self.saved = SavedStep(checkpoint["global_step"], checkpoint["validated"])
        checkpoint["loops"] = {"fit_loop": loop_state_after(trainer, *self.saved)}
        self._only_validates = self.saved == (trainer.max_steps, False)
        if self._only_validates:
            # Lightning's loop would end without the validation, because no step is left.
            trainer.fit_loop.epoch_loop.max_steps = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore what Lightning does not restore, if the run resumes from gptrain's checkpoint.

        These are the logged metrics, the optimizer options and learning rates that the config has
        changed (rank 0 logs each as a warning), and the states of the random generators. On another
        number of ranks each rank gets a random state of its own that was not saved. If the
        checkpoint was saved before the validation of its step, and the number of ranks is the same,
        the repeated validation amends this checkpoint (see `allow_amendment`). If only this
        validation is left to do, `trainer.val_check_batch` becomes 1, so that it takes place
        whatever the validation interval.

        In every run the interval of `checkpoint.every_minutes` begins here. All ranks must call
        this method.

        Raises:
            DamagedCheckpointError: On rank 0, if that checkpoint was damaged after it was verified.
        """
        if self._only_validates:
            trainer.val_check_batch = 1  # validate the last step, whatever the interval
        if self._loaded is not None:
            resume_run(trainer, self._loaded, self.changed)
            if not self.saved.validated and len(self._loaded["rng"]) == trainer.world_size:
                allow_amendment(trainer, self.store.folder / folder_name(self.saved.step))
            self._loaded = None
        self._rng.append((trainer.global_step, capture()))
        self._completed_step = trainer.global_step if self.saved.validated else 0
        self._interval_start_s = monotonic()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random generator states and logged metrics that an exact resume needs.

        Lightning's loop counters are removed: a resumed run computes them. All ranks must call this
        method, because it gathers the states of the random generators. Files of Lightning's own
        callbacks, such as ModelCheckpoint, stay as Lightning makes them.
        """
        if strategy_of(trainer).saves_to_store:
            # A failed step has drawn random numbers, and the resumed run repeats this step: save
            # the RNG state from before the failed step.
            rng = dict(self._rng).get(trainer.global_step) if self._is_salvaging else None
            add_state(trainer, checkpoint, self.saved.validated, rng)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save a step if it is due, and complete a background save that all ranks have written.

        A step that is followed by a validation, or that ends an epoch, is left to a later hook.
        That hook always saves a step with a validation, and the last step of an epoch if it is due.
        Does nothing after a micro-batch that does not end its optimizer step. All ranks must call
        this method.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files.
            RefusedStepError: If the step is saved, but was refused, and the run ends because of it.
            DataError: If the step is saved, but is step 0 of the run and had no target.
        """
        if not ends_step(trainer, batch_idx):
            return
        self._finish_if_written(trainer)
        self._rng.append((trainer.global_step, capture()))
        if not self._has_pending_hooks(trainer):
            self._completed_step = trainer.global_step
            if self._is_due(trainer):
                self.save(trainer)

    def before_validation(self, trainer: Trainer) -> None:
        """Save the step that is about to be validated, if it is not saved yet.

        `TrainingMonitor` calls this method on all ranks, after all callbacks have seen the end of
        the step. It calls it before `on_validation_start` of any other callback, which may replace
        the weights for the validation.

        Args:
            trainer: Trainer of the run.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files.
            RefusedStepError: If the last step was refused and the run ends because of it.
            DataError: If the last step is step 0 of the run and had no target.
        """
        if self.saved.step < trainer.global_step:
            self.save(trainer, validated=False)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Turn a background save into a checkpoint, if all ranks have written its files.

        Does nothing without such a save. All ranks must call this method, because they vote.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files.
        """
        self._finish_if_written(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the metrics of the validation to the checkpoint that was saved before it.

        The step is saved again instead if its checkpoint cannot be amended, for example because
        shards of the weights have changed since then. If the step also ends an epoch,
        on_train_epoch_end does this after the hooks of the epoch's end. After the first validation,
        rank 0 warns if `checkpoint.monitor` or `objective` was not logged. If the run has resumed
        only to repeat this validation, `trainer.should_stop` is set. Does nothing in an evaluation
        and in the sanity check. All ranks must call this method.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files.
        """
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        trainer.should_stop |= self._only_validates
        self._metrics = reproducible_metrics(trainer)
        if trainer.is_global_zero:
            warn_about_missing(self._expected_metrics, self._metrics)
        self._expected_metrics = {}
        if not ends_epoch(trainer):
            self._complete(trainer)
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step of an epoch, if due, after this hook of all other callbacks.

        If the step was saved before its validation, its checkpoint gets the metrics and the changed
        states of callbacks. It is saved again only if this checkpoint cannot be amended, for
        example because shards of the weights have changed since then. Does nothing if training has
        stopped within the epoch. All ranks must call this method.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files.
        """
        if ends_epoch(trainer):
            self._complete(trainer)
            if self._is_due(trainer) or self._metrics is not None:
                self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if it is not saved yet, and finish a background save.

        All ranks must call this method.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files.
            RefusedStepError: If the last step was refused and the run ends because of it.
            DataError: If the last step is step 0 of the run and had no target.
        """
        if trainer.global_step > self.saved.step:
            self.save(trainer)
        self.finish(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the metrics of the checkpoint as the result, if no step was left to train.

        Does nothing if the training has begun.
        """
        if self._loaded is not None:
            restore_logged(trainer, self._loaded)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait after a fit until rank 0 has copied the last checkpoint to the mirror, if any."""
        if stage == "fit":
            self._wait_for_mirror(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save the newest complete step after an error, if every rank has failed after this step.

        A save in the background is completed in the same way. Does nothing if neither is needed,
        before the training has begun, after an error that makes a save impossible or useless
        (see `may_save`), or if only the hooks of the epoch's end are missing: a run cannot resume
        there unless a validation is due. An error of this save is logged and not raised, because
        the first error is to be reported.

        A run that was asked to stop ends by a PreemptedError, and has saved its last step before if
        any step was done. Nothing is saved then, but all ranks wait until this checkpoint is copied
        to `checkpoint.mirror`, if there is one.
        """
        if isinstance(exception, PreemptedError):
            if exception.step is not None:  # all ranks have agreed to stop
                self._wait_for_mirror(trainer)
            return
        step = trainer.global_step
        validated = step <= self._completed_step or not self._has_pending_hooks(trainer)
        is_unsaved = step > self.saved.step and (validated or is_validated(trainer, step))
        if not self._rng or not (is_unsaved or self.store.is_unfinished):
            return
        try:
            if not may_save(trainer, exception):
                return
            self.finish(trainer)
            self._is_salvaging = True
            if is_unsaved:
                self.save(trainer, validated=validated)
            log.info(labels.line("saved", f"step {step}, before the error"))
            self._wait_for_mirror(trainer)
        except Exception as error:
            log.warning("warning: nothing was saved after the error: %s", first_line(error))

    def save(self, trainer: Trainer, *, validated: bool = True) -> None:
        """Save the current step, or amend its checkpoint if it was saved before its validation.

        All ranks must call this method. A step that is already saved in this state is not saved
        again, but a save in the background is completed. With `checkpoint.background` a large save
        is written in the background and becomes a checkpoint some steps later, except at the end of
        the run.

        First the decision whether the optimizer has taken the step is read. Once the save is a
        checkpoint, older checkpoints beyond `checkpoint.keep` are removed, except the best one. The
        interval of `checkpoint.every_minutes` starts again.

        Args:
            trainer: Trainer of the run.
            validated: Whether the validation and the epoch-end hooks that follow the step are
                done. If False, a resumed run repeats them.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files. The earlier
                checkpoints are intact.
            RefusedStepError: On all ranks that take the step together, if the last step was refused
                and the run ends because of it. Nothing is saved then.
            DataError: In the same way, if the last step is step 0 of the run and had no target.
        """
        strategy = strategy_of(trainer)
        strategy.conclude_step()
        step = trainer.global_step
        self.time_is_up = False
        self._interval_start_s = monotonic()
        if self.saved == (step, validated):
            self.finish(trainer)
            return
        is_saved = self.saved == (step, False)  # before its validation
        is_amendment = is_saved and all(gather(strategy.is_unchanged_since_save()))
        is_last = self.stopping or self._is_salvaging or step == trainer.max_steps
        self.saved = SavedStep(step, validated)
        if is_amendment:
            with self.timeline.during("saves", trainer.global_step):
                amend_checkpoint(trainer, self.store, self._metrics or {})
        else:
            self.finish(trainer)
            if not trainer.is_global_zero:
                self._allow_long_phase("save")
            is_large = self._needed_bytes >= BACKGROUND_BYTES
            with self.timeline.during("saves", trainer.global_step):
                write_checkpoint(
                    trainer,
                    self.store,
                    config=self.identity,
                    metrics=self._metrics,
                    needed_bytes=self._needed_bytes,
                    in_background=self.options.background and is_large and not is_last,
                )
        self._metrics = None
        if not self.store.is_unfinished:
            self._prune(trainer)
        elif is_last:
            self.finish(trainer)

    def _complete(self, trainer: Trainer) -> None:
        """Record that all hooks of the validation and epoch after this step are done.

        The states of the random generators at this point are kept for a checkpoint that is saved
        after an error in the next step.
        """
        self._completed_step = trainer.global_step
        self._rng.append((trainer.global_step, capture()))

    def _has_pending_hooks(self, trainer: Trainer) -> bool:
        """Return whether a validation, or the hooks of the epoch's end, follow the current step."""
        return ends_epoch(trainer) or is_validated(trainer, trainer.global_step)

    def ranking(self) -> list[Path]:
        """Return the folders of the checkpoints that have the monitored metric, the best first.

        The list is empty if none has it. The checkpoints are not verified.

        Raises:
            OSError: If the folder of the checkpoints exists and cannot be read.
        """
        return self.store.ranking(self.options.monitor, self.options.mode)

    def finish(self, trainer: Trainer) -> None:
        """Wait for a save in the background and turn its files into a checkpoint.

        Then older checkpoints beyond `checkpoint.keep` are removed, except the best one. All ranks
        must call this method. It does nothing if there is no such save.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files.
        """
        if not self.store.is_unfinished:
            return
        with self.timeline.during("saves", trainer.global_step):
            self._allow_long_phase("save")
            self._writing_vote.close()
            self.store.finish()
            self._prune(trainer)

    def _finish_if_written(self, trainer: Trainer) -> None:
        """Turn a save in the background into a checkpoint, if a vote shows that it is written.

        All ranks must call this method at the same points of the run, because they vote whether any
        of them is still writing. With several ranks the result of a vote is known at the next call.
        It does nothing if there is no such save.

        Raises:
            SaveFailedError: On all ranks, if a rank could not write its files.
        """
        if not self.store.is_unfinished:
            return
        if self._writing_vote.ask(self.store.is_writing) == (False,):
            self.finish(trainer)

    def _allow_long_phase(self, phase: str) -> None:
        """Send a heartbeat that lets this rank be silent for WRITING_S, without counting as a hang.

        Does nothing if the store has no function `progress`.

        Args:
            phase: Name of the phase that the watchdog reports, "save" or "mirror".
        """
        if self.store.progress:
            self.store.progress(phase=phase, allow_s=WRITING_S)

    def _wait_for_mirror(self, trainer: Trainer) -> None:
        """Wait on all ranks until rank 0 has copied the last checkpoint to the mirror, if any.

        The other ranks wait too, because a launcher kills the job soon after the first rank exits.
        They wait for at most WRITING_S. All ranks must call this method. An error of the copy is
        only logged. Does nothing without a mirror.
        """
        mirror = self.mirror
        if mirror is None:
            return

        def finish() -> None:
            mirror.update(self.store)  # also copies what an earlier, killed start did not copy
            mirror.wait()

        self._allow_long_phase("mirror")
        with self.timeline.during("saves", trainer.global_step):
            wait_for_rank_0(finish, trainer.global_rank, WRITING_S)

    def _prune(self, trainer: Trainer) -> None:
        """Remove on rank 0 all checkpoints except the newest `checkpoint.keep` and the best one.

        Without a checkpoint that has the monitored metric, only the newest ones stay.
        """
        if trainer.is_global_zero:
            self.store.prune(self.options.keep, protect=self.ranking()[:1])

    def votes_to_save(self, trainer: Trainer) -> bool:
        """Return whether this rank votes to save, because `checkpoint.every_minutes` have passed.

        Only rank 0 reads the clock, so only rank 0 can vote yes; its clock then starts again. The
        result is False outside of the training, and after a step that is saved anyway.

        `TrainingMonitor` calls this method and collects the votes. With several ranks the result of
        the vote is known one step later, on all ranks, and sets `time_is_up`.
        """
        every = self.options.every_minutes
        if every is None or not trainer.is_global_zero or not trainer.training:
            return False
        if self._has_pending_hooks(trainer) or self._is_due(trainer):
            return False  # the step is saved without the vote
        now_s = monotonic()
        if now_s - self._interval_start_s < 60 * every:
            return False
        self._interval_start_s = now_s
        return True

    def _is_due(self, trainer: Trainer) -> bool:
        """Return whether the current step is saved even if no validation follows it.

        That is so at the end of an interval of `checkpoint.every_n_steps` or `every_minutes`, and
        when the run is about to end.

        `save` is a collective operation, so the result must be identical on all ranks. Otherwise
        the ranks that save wait for the other ranks until `strategy.timeout_s`. A condition may use
        the step, the config and the result of a `Vote`. It must not use the clock, signals, files
        or metrics of one rank.
        """
        every_n_steps = self.options.every_n_steps
        is_interval_over = bool(every_n_steps) and trainer.global_step % every_n_steps == 0
        return is_interval_over or self.time_is_up or self.stopping or trainer.should_stop

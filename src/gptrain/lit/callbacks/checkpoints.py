"""Saves the run so that it can resume bit for bit: before a validation, or between two."""

import logging
from pathlib import Path
from time import monotonic
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from gptrain.checkpoints.manifest import folder_name
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.rng import capture
from gptrain.checkpoints.status import PreemptedError
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import labels
from gptrain.core.errors import DONE, ConfigIssue, first_line
from gptrain.lit.callbacks.resume import (
    STATE,
    add_state,
    reproducible_metrics,
    restore_logged,
    resume_run,
)
from gptrain.lit.callbacks.salvage import allow_amendment, may_save
from gptrain.lit.callbacks.vote import Vote, gather
from gptrain.lit.lightning import data_of, ends_step, is_validated, loop_state_after, strategy_of
from gptrain.parallel.mesh import wait_for_rank_0

log = logging.getLogger(__name__)
# Smaller saves take less than a fifth of a second and are on the disk before the next step begins.
BACKGROUND_BYTES = 1 << 26
WRITING_S = 3600.0  # rank 0 may write that long; it beats at every piece, the others wait for it


class Checkpoints(Checkpoint):
    """Saves each step once: one that is validated before that, one that ends an epoch after that.

    A validation that fails then costs no training. What the validation adds, metrics and states of
    callbacks, amends the checkpoint afterwards; until then it has no metric and is nobody's best.
    Lightning calls this callback after all others, so that a save holds what they did at this step.

    A run that fails between two saves saves the newest step that is complete, if all ranks have
    failed after the same one: see `on_exception`.

    Args:
        store: the run's checkpoints.
        identity: key -> value of what must not change on a resume; kept in each manifest.
        options: the `checkpoint` group.
        parameter_bytes: what a save holds of each parameter: it, and its optimizer's states.
        changed: options of the optimizer that a resume is allowed to change, and does.
        objective: the logged name that a sweep reads.
        mirror: gets a copy of each checkpoint while steps go on; no rank of a run that ends, or was
            asked to stop, leaves before the last copy is there.
        meeting_place: folder of this start, where ranks that fail ask each other whether to save.

    Attributes:
        stopping: the ranks have agreed to leave; set by `TrainingMonitor`.
        time_is_up: The ranks have agreed to save, as `every_minutes` have passed since the last
            save; set by `TrainingMonitor`.
        saved: the newest step that is saved, and whether what was due after it was done: its
            validation, and the hooks of its epoch's end.
    """

    def __init__(
        self,
        store: CheckpointStore,
        identity: dict[str, Any],
        options: Any,
        parameter_bytes: int,
        changed: tuple[str, ...],
        objective: str,
        mirror: Mirror | None,
        meeting_place: Path | None = None,
    ):
        self.store, self.identity, self.options = store, identity, options
        self.parameter_bytes, self.mirror = parameter_bytes, mirror
        if mirror is not None:
            store.on_commit = lambda: mirror.update(store)
        self.changed = frozenset(changed)
        self.stopping = self.time_is_up = False
        self.saved = 0, True
        self._metrics: dict[str, float] | None = None  # of a validation that is not saved yet
        self._only_validates = False
        self._awaited = {  # until the first validation: key, a logged name, what follows without it
            "checkpoint.monitor": (options.monitor, "the newest checkpoint is the best"),
            "objective": (objective, "a sweep finds no best run"),
        }
        self._loaded: dict[str, Any] | None = None  # of a checkpoint to go on from
        self._rng: tuple[int, dict[str, Any]] | None = None  # a step, and as that has left them
        self._completed = 0  # the newest step of which all that was due is done
        self._is_salvaging = False
        self.meeting_place = meeting_place
        self._needed_bytes = 0  # of a save, estimated
        self._interval_start_s = 0.0  # of every_minutes; read by rank 0 alone
        self._writing = Vote()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises SaveFailedError unless there is room for two saves: the newer before the
        older goes.
        """
        if stage != "fit":
            return
        self._needed_bytes = self.parameter_bytes * strategy_of(trainer).info.n_parameters
        if trainer.is_global_zero:
            self.store.check_space(2 * self._needed_bytes)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Every counter follows from the step, whatever the number of ranks was."""
        if "validated" not in checkpoint or trainer.state.fn != "fit":
            return
        self._loaded = {key: checkpoint[key] for key in STATE}  # the rest is freed meanwhile
        self.saved = checkpoint["global_step"], checkpoint["validated"]
        checkpoint["loops"] = {"fit_loop": loop_state_after(trainer, *self.saved)}
        self._only_validates = self.saved == (trainer.max_steps, False)
        if self._only_validates:
            trainer.fit_loop.epoch_loop.max_steps = -1  # with no step left it would do nothing

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._only_validates:
            trainer.val_check_batch = 1  # a run's last step is validated whatever the interval
        if self._loaded is not None:
            resume_run(trainer, self._loaded, self.changed)
            if not self.saved[1] and len(self._loaded["rng"]) == trainer.world_size:
                allow_amendment(trainer, self.store.folder / folder_name(self.saved[0]))
            self._loaded = None
        self._rng = trainer.global_step, capture()
        self._completed = trainer.global_step if self.saved[1] else 0
        self._interval_start_s = monotonic()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if strategy_of(trainer).saves_to_store:  # and it is not ModelCheckpoint that saves
            # The step that failed has drawn numbers since, which its repetition is to draw again.
            rng = None
            if self._is_salvaging and self._rng and self._rng[0] == trainer.global_step:
                rng = self._rng[1]
            add_state(trainer, checkpoint, self.saved[1], rng)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not ends_step(trainer, batch_idx):
            return
        self._finish_if_written(trainer)
        self._rng = trainer.global_step, capture()
        # Else it is saved before its validation, or after its epoch's hooks.
        if not self._more_follows(trainer):
            self._completed = trainer.global_step
            if self._is_due(trainer):
                self.save(trainer)

    def before_validation(self, trainer: Trainer) -> None:
        """Save the step that is about to be validated.

        Steps calls it before any other callback or module begins the validation, which may swap
        weights, and after all of them have seen the end of the step.
        """
        strategy_of(trainer).on_validation_start()  # replicas of DiLoCo synchronize
        if self.saved[0] < trainer.global_step:
            self.save(trainer, validated=False)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Makes a checkpoint of a save in the background as soon as it is written."""
        self._finish_if_written(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        trainer.should_stop |= self._only_validates
        self._metrics = reproducible_metrics(trainer)
        if trainer.is_global_zero:
            self._warn_of_names(self._metrics)
        if not self._ends_epoch(trainer):
            self._complete(trainer)
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ends_epoch(trainer):
            self._complete(trainer)
            if self._is_due(trainer) or self._metrics is not None:
                self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self.saved[0]:
            self.save(trainer)
        self.finish(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded is not None:  # no step was left: what the run had come to is its result
            restore_logged(trainer, self._loaded)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._wait_for_mirror(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save the newest complete step, if all ranks have failed after it: see `may_save`."""
        if isinstance(exception, PreemptedError):
            if exception.step is not None:  # all ranks agreed
                self._wait_for_mirror(trainer)
            return
        step, is_unsaved = trainer.global_step, trainer.global_step > self.saved[0]
        if not self._rng or not (is_unsaved or self.store.is_unfinished):
            return
        validated = step == self._completed or not self._more_follows(trainer)
        facts = [step, is_unsaved, validated]
        try:
            if not may_save(trainer, exception, facts, self.meeting_place):
                return
            self.finish(trainer)
            self._is_salvaging = True
            if is_unsaved:
                self.save(trainer, validated=validated)
            log.info(labels.line("saved", f"step {step}, before the error"))
            self._wait_for_mirror(trainer)
        except Exception as error:  # the first error is the one to report
            log.warning("warning: nothing was saved after the error: %s", first_line(error))

    def save(self, trainer: Trainer, *, validated: bool = True) -> None:
        """Save this step; after its validation only what that has changed. All ranks must call it.

        A large save may become a checkpoint some steps later; at once where the run ends with it.

        Args:
            validated: False where the step's validation is still to come, or to be repeated.

        Raises:
            SaveFailedError: On all ranks alike, with the earlier checkpoints intact.
        """
        step, strategy, options = trainer.global_step, strategy_of(trainer), self.options
        self.time_is_up, self._interval_start_s = False, monotonic()
        if self.saved == (step, validated):
            self.finish(trainer)
            return
        amends = self.saved == (step, False) and all(gather(strategy.is_unchanged_since_save()))
        self.saved = step, validated
        if amends:
            self._amend(trainer)
            return
        self.finish(trainer)
        if not trainer.is_global_zero:
            self._announce("save")
        is_large = self._needed_bytes >= BACKGROUND_BYTES
        ends = self.stopping or self._is_salvaging or step == trainer.max_steps
        with self.store.writing(
            step,
            kind="sharded" if strategy.parallel.is_partitioned else "full",
            config=self.identity,
            metrics=self._metrics,
            needed_bytes=self._needed_bytes,
            rank=trainer.global_rank,
            gather=gather,
            in_background=options.background and is_large and not ends,
        ) as draft:
            strategy.saves_to_store = True
            try:
                trainer.save_checkpoint(draft.path, weights_only=False, storage_options=draft)
            finally:  # a callback may save on an exception
                strategy.saves_to_store = False
        self._metrics = None
        if not self.store.is_unfinished:
            self._tidy(trainer)

    def _amend(self, trainer: Trainer) -> None:
        """Add to the checkpoint of this step what its validation has changed."""
        strategy, files = strategy_of(trainer), {}
        strategy.saves_to_store = True
        try:
            path = self.store.folder / folder_name(trainer.global_step)
            trainer.save_checkpoint(path, weights_only=False, storage_options=files)
        finally:
            strategy.saves_to_store, strategy.saved = False, None
        rank, metrics = trainer.global_rank, self._metrics or {}
        self.store.amend(trainer.global_step, files, metrics, rank=rank, gather=gather)
        self._metrics = None
        if not self.store.is_unfinished:
            self._tidy(trainer)
        elif self.stopping or trainer.global_step == trainer.max_steps:
            self.finish(trainer)

    def _complete(self, trainer: Trainer) -> None:
        """All that was due after this step is done."""
        self._completed = trainer.global_step
        self._rng = self._completed, capture()

    def _more_follows(self, trainer: Trainer) -> bool:
        """Whether a validation, or the hooks of an epoch's end, follow this step."""
        return self._ends_epoch(trainer) or is_validated(trainer, trainer.global_step)

    def ranking(self) -> list[Path]:
        """The checkpoints with the monitored metric, the best first."""
        return self.store.ranking(self.options.monitor, self.options.mode)

    def finish(self, trainer: Trainer) -> None:
        """Makes a checkpoint of a save in the background, waiting for it where it must."""
        if not self.store.is_unfinished:
            return
        self._announce("save")
        self._writing.close()
        self.store.finish()
        self._tidy(trainer)

    def _finish_if_written(self, trainer: Trainer) -> None:
        """Turn a save in the background into a checkpoint once all ranks have written it."""
        if self.store.is_unfinished and self._writing.ask(self.store.is_writing) == (False,):
            self.finish(trainer)

    def _announce(self, phase: str) -> None:
        """Tells the watchers that the next sign of life may take long."""
        if self.store.progress:
            self.store.progress(phase=phase, allow_s=WRITING_S)

    def _wait_for_mirror(self, trainer: Trainer) -> None:
        """On all ranks: a launcher ends them soon after the first has left."""
        if (mirror := self.mirror) is None:
            return

        def finish() -> None:
            mirror.update(self.store)  # what is there of a start that was killed, or pruned
            mirror.wait()

        self._announce("mirror")
        wait_for_rank_0(finish, trainer.global_rank, WRITING_S)

    def _tidy(self, trainer: Trainer) -> None:
        """Removes old checkpoints."""
        if trainer.is_global_zero:
            self.store.prune(self.options.keep, protect=self.ranking()[:1])

    def votes_to_save(self, trainer: Trainer) -> bool:
        """Return this rank's vote on saving because of `checkpoint.every_minutes`.

        Only rank 0 looks at the clock and ever votes yes. The answer arrives on all ranks with the
        vote on stopping, one step later on several ranks, and sets `time_is_up`.
        """
        every = self.options.every_minutes
        if every is None or not trainer.is_global_zero or not trainer.training:
            return False
        if self._more_follows(trainer) or self._is_due(trainer):  # the step is saved anyway
            return False
        now_s = monotonic()
        if now_s - self._interval_start_s < 60 * every:
            return False
        self._interval_start_s = now_s
        return True

    def _is_due(self, trainer: Trainer) -> bool:
        """Return whether this step is saved although no validation saves it.

        This decides whether ranks call `save`, which is a collective operation: the answer must be
        the same on all ranks, or those that save wait for the others until `strategy.timeout_s`. A
        condition may use the step, the config and what ranks have agreed on (see `Vote`). It must
        not use a rank's own clock, signals, files or metrics.
        """
        every = self.options.every_n_steps
        is_turn = bool(every) and trainer.global_step % every == 0
        return is_turn or self.time_is_up or self.stopping or trainer.should_stop

    def _ends_epoch(self, trainer: Trainer) -> bool:
        return trainer.global_step % data_of(trainer).epoch_steps == 0

    def _warn_of_names(self, metrics: dict[str, float]) -> None:
        """Says once which name is never logged; of what is measured in time it is not known."""
        names = ", ".join(name for name in sorted(metrics) if name != "step")
        for key, (name, effect) in self._awaited.items():
            if name not in metrics and not name.startswith("perf/"):
                message = f"not logged in the first validation; {effect}"
                log.warning("%s", ConfigIssue(key, name, message, names, code=DONE).line)
        self._awaited = {}

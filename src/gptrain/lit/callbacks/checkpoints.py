"""Saves the run so that it can go on bit for bit: after a validation, or between two."""

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from gptrain.lit.callbacks.resume import (
    STATE,
    add_state,
    go_on,
    put_back_logged,
    without_clocks,
)
from gptrain.lit.callbacks.vote import Vote, gather
from gptrain.lit.lightning import data_of, ends_step, is_validated, loops_after, strategy_of
from gptrain.parallel.mesh import wait_for_rank_0
from gptrain.problems import DONE, Problem
from gptrain.resilience.mirror import Mirror
from gptrain.resilience.rng import capture
from gptrain.resilience.status import Preempted
from gptrain.resilience.store import CheckpointStore

log = logging.getLogger(__name__)
# Smaller saves take less than a fifth of a second and are on the disk before the next step begins.
BACKGROUND_BYTES = 1 << 26
WRITING_S = 3600.0  # rank 0 may write that long; it beats at every piece, the others wait for it


class Checkpoints(Checkpoint):
    """One save per step: where a step is validated, after that; where it ends an epoch, after that.

    Lightning calls it after all other callbacks, so that a save holds what they did at this step.

    Args:
        store: the run's checkpoints.
        identity: key -> value of what must not change on a resume; kept in each manifest.
        options: the `checkpoint` group.
        parameter_bytes: what a save holds of each parameter: it, and its optimizer's states.
        changed: options of the optimizer that a resume is allowed to change, and does.
        objective: the logged name that a sweep reads.
        mirror: gets a copy of each checkpoint while steps go on; no rank of a run that ends, or was
            asked to stop, leaves before the last copy is there.

    Attributes:
        stopping: the ranks have agreed to leave; set by `Steps`.
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
    ):
        self.store, self.identity, self.options = store, identity, options
        self.parameter_bytes, self.mirror = parameter_bytes, mirror
        if mirror is not None:
            store.on_commit = lambda: mirror.update(store)
        self.changed = frozenset(changed)
        self.stopping = False
        self.saved = 0, True
        self._metrics: dict[str, float] | None = None  # of a validation that is not saved yet
        self._only_validates = False
        self._awaited = {  # until the first validation: key, a logged name, what follows without it
            "checkpoint.monitor": (options.monitor, "the newest checkpoint is the best"),
            "objective": (objective, "a sweep finds no best run"),
        }
        self._loaded: dict[str, Any] | None = None  # of a checkpoint to go on from
        self._rng: dict[str, Any] | None = None  # before the validation that is going on
        self._needed_bytes = 0  # of a save, estimated
        self._writing = Vote()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises SaveFailed unless there is room for two saves: the newer before the older goes."""
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
        checkpoint["loops"] = {"fit_loop": loops_after(trainer, *self.saved)}
        self._only_validates = self.saved == (trainer.max_steps, False)
        if self._only_validates:
            trainer.fit_loop.epoch_loop.max_steps = -1  # with no step left it would do nothing

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._only_validates:
            trainer.val_check_batch = 1  # a run's last step is validated whatever the interval
        if self._loaded is not None:
            go_on(trainer, self._loaded, self.changed)
            self._loaded = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if strategy_of(trainer).saves_to_store:  # and it is not ModelCheckpoint that saves
            add_state(trainer, checkpoint, self.saved[1], self._rng)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not ends_step(trainer, batch_idx):
            return
        if self.store.is_unfinished and self._writing.ask(self.store.is_writing) is False:
            self._finish(trainer)
        # Else it is saved after its validation, after its epoch's hooks, or by Steps as it leaves.
        more_follows = self._ends_epoch(trainer) or is_validated(trainer, trainer.global_step)
        if self._is_due(trainer) and not more_follows:
            self.save(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rng = capture()  # a validation that is left is repeated from its start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rng = None
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        trainer.should_stop |= self._only_validates
        self._metrics = without_clocks(trainer)
        if trainer.is_global_zero:
            self._warn_of_names(self._metrics)
        if not self._ends_epoch(trainer):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ends_epoch(trainer) and (self._is_due(trainer) or self._metrics is not None):
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self.saved[0]:
            self.save(trainer)
        self._finish(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded is not None:  # no step was left: what the run had come to is its result
            put_back_logged(trainer, self._loaded)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._wait_for_mirror(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, Preempted) and exception.step is not None:  # all ranks agreed
            self._wait_for_mirror(trainer)

    def save(self, trainer: Trainer, *, validated: bool = True) -> None:
        """Saves this step, once before and once after its validation; all ranks must call it.

        A large one may be a checkpoint some steps later; at once where the run ends with it.

        Args:
            validated: false where its validation is still to come, or to be repeated.
        Raises: SaveFailed, on all ranks alike, with the earlier checkpoints intact.
        """
        self._finish(trainer)
        step, strategy, options = trainer.global_step, strategy_of(trainer), self.options
        if self.saved == (step, validated):
            return
        self.saved = step, validated
        if not trainer.is_global_zero:
            self._announce("save")
        is_large = self._needed_bytes >= BACKGROUND_BYTES
        ends = self.stopping or step == trainer.max_steps
        with self.store.writing(
            step,
            kind="sharded" if strategy.parallel.partitions else "full",
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

    def ranking(self) -> list[Path]:
        """The checkpoints with the monitored metric, the best first."""
        return self.store.ranking(self.options.monitor, self.options.mode)

    def _finish(self, trainer: Trainer) -> None:
        """Makes a checkpoint of a save in the background, waiting for it where it must."""
        if not self.store.is_unfinished:
            return
        self._announce("save")
        self._writing.close()
        self.store.finish()
        self._tidy(trainer)

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

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether a step is saved also where it is not validated."""
        every = self.options.every_n_steps
        is_turn = bool(every) and trainer.global_step % every == 0
        return is_turn or self.stopping or trainer.should_stop

    def _ends_epoch(self, trainer: Trainer) -> bool:
        return trainer.global_step % data_of(trainer).epoch_steps == 0

    def _warn_of_names(self, metrics: dict[str, float]) -> None:
        """Says once which name is never logged; of what is measured in time it is not known."""
        names = ", ".join(name for name in sorted(metrics) if name != "step")
        for key, (name, effect) in self._awaited.items():
            if name not in metrics and not name.startswith("perf/"):
                wrong = f"not logged in the first validation; {effect}"
                log.warning("%s", Problem(key, name, wrong, names, code=DONE).line)
        self._awaited = {}

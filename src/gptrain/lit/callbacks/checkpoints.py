"""Saves the run so that it can go on bit for bit: after a validation, or between two."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from gptrain.lit.finite import gather
from gptrain.lit.loops import loops_after
from gptrain.lit.module import LanguageModel
from gptrain.lit.vote import Vote
from gptrain.resilience.rng import capture, restore
from gptrain.resilience.store import CheckpointStore

log = logging.getLogger(__name__)
PARAMETER_BYTES = 12  # fp32 and Adam's two states
# Smaller saves take less than a fifth of a second and are on the disk before the next step begins.
BACKGROUND_BYTES = 1 << 26
WRITING_S = 3600.0  # rank 0 may write that long; it beats at every piece, the others wait for it


class Checkpoints(Callback):
    """One save per step: where a step is validated, after that, with its metrics.

    Args:
        store: the run's checkpoints.
        identity: key -> value of what must not change on a resume; kept in each manifest.
        every_n_steps: between validations too; None: only after them.
        keep: newest ones kept, besides the one with the lowest `monitor`.
        validate_every: steps between validations.
        n_steps: of the run; its last step is always saved.
        in_background: of a large save only the copy in memory stops the training; it is written
            while the steps go on, and is a checkpoint when all ranks have written.
    """

    def __init__(
        self,
        store: CheckpointStore,
        identity: dict[str, Any],
        *,
        every_n_steps: int | None,
        keep: int,
        monitor: str,
        validate_every: int,
        n_steps: int | None,
        in_background: bool = True,
    ):
        self.store, self.identity = store, identity
        self.every_n_steps, self.keep, self.monitor = every_n_steps, keep, monitor
        self.validate_every, self.n_steps = validate_every, n_steps
        self.in_background = in_background
        self.saved: tuple[int, bool] | None = None  # step, and whether its validation was done
        self.metrics: dict[str, float] = {}  # of the validation that was just done
        self._rng: list[dict[str, Any]] | None = None
        self._rate = 0.0  # that the step after the loaded checkpoint was to take
        self._before_validation: dict[str, Any] | None = None
        self._needed_bytes = 0  # of a save, estimated
        self._writing = Vote()

    def setup(self, trainer: Trainer, module: LanguageModel, stage: str) -> None:
        """Raises NoSpace unless there is room for two saves: the newer before the older goes."""
        if stage != "fit":
            return
        self._needed_bytes = PARAMETER_BYTES * trainer.strategy.told["n_parameters"]
        if trainer.is_global_zero:
            self.store.check_space(2 * self._needed_bytes)

    def on_train_start(self, trainer: Trainer, module: LanguageModel) -> None:
        """Puts back this rank's random numbers; nothing random happens between here and a step."""
        if self._rng is None:
            return
        step, validated = self.saved
        self._compare_rates(trainer, module, step)
        if step == self.n_steps and not validated:
            trainer.val_check_batch = 1  # the last step is validated whatever the interval
        if len(self._rng) == trainer.world_size:
            restore(self._rng[trainer.global_rank])
        else:
            restore(self._rng[0])
            stream = int(torch.randint(2**62, ()))
            torch.manual_seed(stream + trainer.datamodule.rank)
            if trainer.is_global_zero:
                log.warning(
                    "resumed on %d ranks what %d ranks saved: the same samples in every step, "
                    "but other dropout and another order of summation",
                    trainer.world_size,
                    len(self._rng),
                )
        self._rng = None

    def on_save_checkpoint(
        self, trainer: Trainer, module: LanguageModel, checkpoint: dict[str, Any]
    ) -> None:
        step, validated = self.saved
        checkpoint["loops"]["fit_loop"] = loops_after(trainer, step, validated)
        checkpoint["validated"] = validated
        checkpoint["rng"] = gather(self._before_validation or capture())
        checkpoint["logged"] = {  # without clocks: two runs alike have checkpoints alike
            name: point for name, point in module.logged.items() if not name.startswith("perf/")
        }

    def on_load_checkpoint(
        self, trainer: Trainer, module: LanguageModel, checkpoint: dict[str, Any]
    ) -> None:
        """Every counter follows from the step, whatever the number of ranks was."""
        if "validated" not in checkpoint or trainer.state.fn != "fit":
            return
        self.saved = checkpoint["global_step"], checkpoint["validated"]
        checkpoint["loops"]["fit_loop"] = loops_after(trainer, *self.saved)
        self._rng = checkpoint["rng"]
        self._rate = checkpoint["lr_schedulers"][0]["_last_lr"][0]
        module.logged = dict(checkpoint["logged"])

    def on_train_batch_end(
        self, trainer: Trainer, module: LanguageModel, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if trainer.fit_loop._should_accumulate():
            return
        if self.store.is_unfinished and self._writing.any(self.store.is_writing) is False:
            self._finish(trainer)
        if self._is_validated(trainer, step):
            return
        if step == self.n_steps or (self.every_n_steps and step % self.every_n_steps == 0):
            self.save(trainer)

    def on_validation_start(self, trainer: Trainer, module: LanguageModel) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._before_validation = capture()
            # Lightning's x axis of what is logged in a validation; it counts the step later.
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step

    def on_validation_end(self, trainer: Trainer, module: LanguageModel) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._before_validation = None
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.metrics = {key: metrics[key] for key in metrics if key.startswith("val/")}
        self.save(trainer, validated=True)
        self.metrics = {}

    def on_train_end(self, trainer: Trainer, module: LanguageModel) -> None:
        if trainer.global_step > (self.saved or (0,))[0]:
            self.save(trainer, at_once=True)  # trainer.max_time ended it between two saves
        self._finish(trainer)

    def save(self, trainer: Trainer, validated: bool = False, at_once: bool = False) -> None:
        """Saves this step, once before and once after its validation; all ranks must call it.

        Args:
            at_once: the checkpoint is there on return, however large.
        Raises: SaveFailed, on all ranks alike, with the earlier checkpoints intact.
        """
        self._finish(trainer)
        if self.saved == (trainer.global_step, validated):
            return
        self.saved = trainer.global_step, validated
        self._wait_for_writing(trainer)
        for logger in trainer.loggers:
            logger.save()  # a resumed run writes the points after this step again, not those before
        is_last = trainer.global_step == self.n_steps
        is_large = self._needed_bytes >= BACKGROUND_BYTES
        with self.store.writing(
            trainer.global_step,
            kind="sharded" if trainer.strategy.saves_shards else "full",
            config=self.identity,
            metrics=self.metrics,
            needed_bytes=self._needed_bytes,
            rank=trainer.global_rank,
            gather=gather,
            in_background=self.in_background and is_large and not (at_once or is_last),
        ) as draft:
            trainer.save_checkpoint(draft.path, weights_only=False, storage_options=draft)
        if not self.store.is_unfinished:
            self._prune(trainer)

    def _compare_rates(self, trainer: Trainer, module: LanguageModel, step: int) -> None:
        """A schedule that follows the run's length bends where a run goes on to another end."""
        rate = module.rate_after(step)
        if trainer.is_global_zero and not math.isclose(rate, self._rate, rel_tol=1e-6):
            log.warning(
                "resumed with another schedule: after step %d the learning rate was to be %.3g and "
                "is %.3g; it follows the run's length unless scheduler.total_steps is set",
                step,
                self._rate,
                rate,
            )

    def _finish(self, trainer: Trainer) -> None:
        """Makes a checkpoint of a save in the background, waiting for it where it must."""
        if not self.store.is_unfinished:
            return
        self._wait_for_writing(trainer)
        self._writing.close()
        self.store.finish()
        self._prune(trainer)

    def _wait_for_writing(self, trainer: Trainer) -> None:
        """Tells the watchers that the next sign of life may take long."""
        waits = self.store.is_unfinished or not trainer.is_global_zero
        if self.store.progress and waits:
            self.store.progress(phase="save", allow_s=WRITING_S)

    def _prune(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            best = self.store.best(self.monitor)
            self.store.prune(self.keep, protect=[best.path] if best else [])

    def _is_validated(self, trainer: Trainer, step: int) -> bool:
        if not trainer.enable_validation:
            return False
        return step == self.n_steps or step % self.validate_every == 0

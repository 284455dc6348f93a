"""Saves the run so that it can go on bit for bit: after a validation, or between two."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch.optim.lr_scheduler import LambdaLR

from gptrain.lit.callbacks.finite import gather
from gptrain.lit.callbacks.vote import Vote
from gptrain.lit.lightning import ends_step, finish_step, loops_after, start_epoch_anew
from gptrain.plan import Lengths
from gptrain.problems import DONE, Problem
from gptrain.resilience.rng import capture, restore
from gptrain.resilience.store import CheckpointStore

log = logging.getLogger(__name__)
PARAMETER_BYTES = 12  # fp32 and Adam's two states
# Smaller saves take less than a fifth of a second and are on the disk before the next step begins.
BACKGROUND_BYTES = 1 << 26
WRITING_S = 3600.0  # rank 0 may write that long; it beats at every piece, the others wait for it


class Checkpoints(Checkpoint):
    """One save per step: where a step is validated, after that; where it ends an epoch, after that.

    Lightning calls it after all other callbacks, so that a save holds what they did at this step.

    Args:
        store: the run's checkpoints.
        identity: key -> value of what must not change on a resume; kept in each manifest.
        options: the `checkpoint` group: every_n_steps, between validations too; keep, the newest
            ones besides the best by `monitor` and `mode`; background, of a large save only the copy
            in memory stops the training.
        lengths: of the run; its last step is always saved.
        changed: options of the optimizer that a resume is allowed to change, and does.
    """

    def __init__(
        self,
        store: CheckpointStore,
        identity: dict[str, Any],
        options: Any,
        lengths: Lengths,
        changed: tuple[str, ...] = (),
    ):
        self.store, self.identity, self.options = store, identity, options
        self.monitor, self.mode = options.monitor, options.mode
        self.n_steps, self.validate_every = lengths.n_steps, lengths.validate_every
        self.changed = changed
        self.stopping = False  # the ranks have agreed to leave: save this step in any case
        self.saved: tuple[int, bool] | None = None  # step, and whether its validation was done
        self.metrics: dict[str, float] = {}  # of the validation that was just done
        self._saving: tuple[int, bool, bool] | None = None
        self._awaits_epoch_end = False  # validated, and to be saved after the hooks of its end
        self._monitor_checked = False
        self._resumed: dict[str, Any] | None = None  # what of a loaded checkpoint is still to do
        self._before_validation: dict[str, Any] | None = None
        self._needed_bytes = 0  # of a save, estimated
        self._writing = Vote()

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Raises NoSpace unless there is room for two saves: the newer before the older goes."""
        if stage != "fit":
            return
        self._needed_bytes = PARAMETER_BYTES * trainer.strategy.info.n_parameters
        if trainer.is_global_zero:
            self.store.check_space(2 * self._needed_bytes)

    # A resume

    def on_load_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Every counter follows from the step, whatever the number of ranks was."""
        if "validated" not in checkpoint or trainer.state.fn != "fit":
            return
        step, validated = self.saved = checkpoint["global_step"], checkpoint["validated"]
        loops = loops_after(trainer, step, validated, checkpoint["epoch_ended"])
        checkpoint["loops"]["fit_loop"] = loops
        self._resumed = {
            key: checkpoint[key] for key in ("rng", "threads", "logged", "epoch_ended")
        }
        if step == self.n_steps and not validated:  # there is only its validation to do
            trainer.fit_loop.epoch_loop.max_steps = -1
            trainer.val_check_batch = 1

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Puts back this rank's random numbers; nothing random happens between here and a step."""
        if self._resumed is None:
            return
        resumed, self._resumed = self._resumed, None
        step, validated = self.saved
        if step == self.n_steps and not validated:
            trainer.val_check_batch = 1  # the last step is validated whatever the interval
        start_epoch_anew(trainer)
        trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in resumed["logged"].items()}
        )
        finish_step(trainer, step, validated, resumed["epoch_ended"])
        self._apply_changes(trainer)
        self._follow_schedule(trainer)
        rng, threads, warns = resumed["rng"], resumed["threads"], trainer.is_global_zero
        if threads != torch.get_num_threads() and trainer.strategy.root_device.type == "cpu":
            log.log(
                logging.WARNING if warns else logging.DEBUG,
                "warning: resumed with %d threads what %d threads saved: sums may differ in their "
                "last bits",
                torch.get_num_threads(),
                threads,
            )
        if len(rng) == trainer.world_size:
            restore(rng[trainer.global_rank])
            return
        restore(rng[0])
        stream = int(torch.randint(2**62, ()))
        torch.manual_seed(stream + trainer.datamodule.rank)
        log.log(
            logging.WARNING if warns else logging.DEBUG,
            "resumed on %d ranks what %d ranks saved: the same samples in every step, but other "
            "dropout and another order of summation",
            trainer.world_size,
            len(rng),
        )

    def _apply_changes(self, trainer: Trainer) -> None:
        """Gives the optimizer the new value of each option that was allowed to change."""
        said: dict[str, None] = {}  # groups have most options alike
        for group, fresh in zip(
            trainer.optimizers[0].param_groups, trainer.strategy.fresh_options or [], strict=True
        ):
            for key in set(self.changed) & fresh.keys():
                name = "initial_lr" if key == "lr" and "initial_lr" in fresh else key
                before, now = group[name], fresh[name]
                if before == now:
                    continue
                group[name] = now
                if name == "initial_lr":  # a schedule's peak; LambdaLR is followed below
                    group["lr"] *= now / before if before else 1.0
                said[f"optimizer.{key}: {before} before, {now} now"] = None
        for line in said if trainer.is_global_zero else ():
            log.info("%-9s %s", "resume", line)

    def _follow_schedule(self, trainer: Trainer) -> None:
        """The next step's learning rate by the schedule of today: it follows the run's length."""
        for scheduled in trainer.lr_scheduler_configs:
            scheduler, groups = scheduled.scheduler, scheduled.scheduler.optimizer.param_groups
            if "lr" in self.changed and hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [group["initial_lr"] for group in groups]
            if not isinstance(scheduler, LambdaLR):
                continue
            before = groups[0]["lr"]
            for group, base, factor in zip(
                groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(scheduler.last_epoch)
            if trainer.is_global_zero and not math.isclose(before, groups[0]["lr"], rel_tol=1e-6):
                log.warning(
                    "resumed with another schedule: after step %d the learning rate was to be %.3g "
                    "and is %.3g; it follows the run's length unless scheduler.total_steps is set",
                    trainer.global_step,
                    before,
                    groups[0]["lr"],
                )

    # Saves

    def on_save_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._saving is None:  # somebody else's, as ModelCheckpoint's
            return
        step, validated, epoch_ended = self._saving
        checkpoint["loops"]["fit_loop"] = loops_after(trainer, step, validated, epoch_ended)
        checkpoint["validated"], checkpoint["epoch_ended"] = validated, epoch_ended
        checkpoint["rng"] = gather(self._before_validation or capture())
        checkpoint["threads"] = torch.get_num_threads()
        checkpoint["logged"] = {  # without clocks: two runs alike have checkpoints alike
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.startswith("perf/")
        }

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not ends_step(trainer, batch_idx):
            return
        if self.store.is_unfinished and self._writing.ask(self.store.is_writing) is False:
            self._finish(trainer)
        if self._ends_epoch(trainer):
            return  # saved after the hooks of its end
        step = trainer.global_step
        is_due = bool(self.options.every_n_steps) and step % self.options.every_n_steps == 0
        if self.stopping:
            self.save(trainer, validated=not self._is_validated(trainer), at_once=True)
        elif (is_due or trainer.should_stop) and not self._is_validated(trainer):
            self.save(trainer)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._before_validation = capture()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._before_validation = None
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._check_monitor(trainer, metrics)
        train = ("train/", "perf/", "tokens", "lr", "grad_norm", "step")
        self.metrics = {
            name: value
            for name, value in metrics.items()
            if name == self.monitor or not name.startswith(train)
        }
        if trainer.global_step == self.n_steps:
            trainer.should_stop = True  # of a resume that had only this left to do
        if self._ends_epoch(trainer):
            self._awaits_epoch_end = True
        else:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        is_due = (
            bool(self.options.every_n_steps)
            and trainer.global_step % self.options.every_n_steps == 0
        )
        asked = is_due or self._awaits_epoch_end or self.stopping or trainer.should_stop
        if asked and self._ends_epoch(trainer):
            self.save(trainer, epoch_ended=True)
        self._awaits_epoch_end = False

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.global_step > (self.saved or (0,))[0]:
            self.save(trainer, at_once=True)
        self._finish(trainer)

    def save(
        self,
        trainer: Trainer,
        *,
        validated: bool = True,
        epoch_ended: bool = False,
        at_once: bool = False,
    ) -> None:
        """Saves this step, once before and once after its validation; all ranks must call it.

        Args:
            validated: false where its validation is still to come, or to be repeated.
            epoch_ended: the hooks of an epoch's end have run.
            at_once: the checkpoint is there on return, however large.
        Raises: SaveFailed, on all ranks alike, with the earlier checkpoints intact.
        """
        self._finish(trainer)
        step = trainer.global_step
        if self.saved == (step, validated) and not epoch_ended:
            return
        self.saved, self._saving = (step, validated), (step, validated, epoch_ended)
        self._wait_for_writing(trainer)
        for logger in trainer.loggers:
            logger.save()  # a resumed run writes the points after this step again, not those before
        is_last, is_large = step == self.n_steps, self._needed_bytes >= BACKGROUND_BYTES
        strategy = trainer.strategy
        with (
            strategy.sharded_save(),
            self.store.writing(
                step,
                kind="sharded" if strategy.partitions else "full",
                config=self.identity,
                metrics=self.metrics,
                needed_bytes=self._needed_bytes,
                rank=trainer.global_rank,
                gather=gather,
                in_background=self.options.background and is_large and not (at_once or is_last),
            ) as draft,
        ):
            trainer.save_checkpoint(draft.path, weights_only=False, storage_options=draft)
        self._saving, self.metrics = None, {}
        if not self.store.is_unfinished:
            self._prune(trainer)

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
            best = self.store.ranking(self.monitor, self.mode)[:1]
            self.store.prune(self.options.keep, protect=best)

    def _is_validated(self, trainer: Trainer) -> bool:
        """Whether a validation follows this step."""
        if not trainer.enable_validation:
            return False
        return trainer.should_stop or trainer.global_step % self.validate_every == 0

    def _ends_epoch(self, trainer: Trainer) -> bool:
        return trainer.global_step % trainer.datamodule.epoch_steps == 0

    def _check_monitor(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Says once that no checkpoint can be the best by a name that is never logged."""
        if self._monitor_checked or self.monitor in metrics:
            return
        self._monitor_checked = True
        if trainer.is_global_zero:
            wrong = "not logged in the first validation; the newest checkpoint counts as the best"
            names = ", ".join(name for name in sorted(metrics) if name != "step")
            problem = Problem("checkpoint.monitor", self.monitor, wrong, names, code=DONE)
            log.warning("%s", problem.line)

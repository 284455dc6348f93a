"""What happens at each step: it is checked, logged and reported; and why the training ended."""

import logging
import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from gptrain.checkpoints.status import NonFiniteError, PreemptedError, shorten
from gptrain.core import labels
from gptrain.core.errors import first_line
from gptrain.core.lengths import RunLengths
from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.callbacks.targets import MissingTargets, check_evaluated
from gptrain.lit.callbacks.unsupported import unsupported_reason
from gptrain.lit.callbacks.vote import Vote, gather
from gptrain.lit.lightning import (
    callbacks_of,
    data_of,
    ends_step,
    is_validated,
    set_log_interval,
    strategy_of,
)
from gptrain.lit.module import (
    LanguageModel,
    describe_optimizer,
    has_own_optimizer,
    warn_of_ignored,
)
from gptrain.lit.nonfinite import find_first
from gptrain.lit.perf import Speed
from gptrain.lit.strategies.base import check_optimization
from gptrain.parallel.requirements import IncompatibleModelError
from gptrain.runtime.watchdog import Guard

log = logging.getLogger(__name__)
STEP = "step"  # Lightning takes a logged value of this name for the x axis, and logs no epoch then
COMPILING_S = 3600.0  # what a first step may take where it compiles


class TrainingMonitor(Callback):
    """Stops or skips a step that is not finite, logs steps, and ends a run that is asked to stop.

    First of all callbacks, so that the others find a step's values in `trainer.callback_metrics`:
    train/loss, lr, grad_norm, tokens and perf/* of every `every_n_steps`-th optimizer step, of the
    first step, which is slower than others, and of those that are validated. They are logged by
    `self.log`, so that what a module or a callback logs goes into the same row.

    All ranks leave at the same step (see Vote), saved, when the next hook is called, so that it is
    logged. Before the first step and in an evaluation there is nothing to save: a rank that was
    asked leaves by itself, and the job ends with it.

    Args:
        lengths: of the run; its last step is logged too, and then validated.
        model_config: of the config's `model` group; kept in every checkpoint file, so that a file
            on its own can be loaded.
        on_nonfinite: "stop" raises NonFiniteError, on all ranks; "skip" skips the step.
        max_skips: skipped steps in a row after which it is raised, too.
        guard: of this rank; None: nobody watches the run.
        checkpoints: what saves the run; None where nothing is kept.
        compiles: the first step of each kind may take long.
        typed: Key -> value of the typed options of the optimizer and the scheduler group.

    Attributes:
        speed, first_step: clock, and steps done, when training began; None: nothing was left.
        ended: why a training did, `reason` and `detail`.
    """

    speed: Speed
    first_step: int | None = None
    ended: dict[str, str] | None = None

    def __init__(
        self,
        every_n_steps: int,
        lengths: RunLengths,
        model_config: dict[str, Any],
        *,
        on_nonfinite: str = "stop",
        max_skips: int = 10,
        guard: Guard | None = None,
        checkpoints: Checkpoints | None = None,
        compiles: bool = False,
        typed: Mapping[str, Any] | None = None,
    ):
        self.every_n_steps, self.lengths = every_n_steps, lengths
        self.model_config, self.on_nonfinite = model_config, on_nonfinite
        self.max_skips, self.n_skipped = max_skips, 0  # the latter in a row, up to now
        self.guard, self.checkpoints = guard, checkpoints
        self.first_s, self.typed = COMPILING_S if compiles else 0.0, typed or {}
        self.votes, self.missing_targets = Vote(), MissingTargets()
        self.stopping = self._is_paused = False
        self.lr = 0.0
        self.evaluated_step = 0  # of the checkpoint that is evaluated

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what only shows in a built run: callbacks that a function or the module made."""
        strategy = strategy_of(trainer)
        strategy.check_finite = self.check_finite
        for callback in callbacks_of(trainer):
            callback_class = type(callback)
            reason = unsupported_reason(
                callback_class, strategy.info.name, bool(trainer.loggers), has_progress_bar=True
            )
            if reason is not None:
                raise IncompatibleModelError("callbacks", f"{callback_class.__name__}: {reason}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.guard:
            self.guard.leave_if_asked()
        self._beat(trainer.global_step, "train", allow_s=self.first_s)
        check_optimization(pl_module)  # again: hooks may have changed it
        if trainer.is_global_zero and has_own_optimizer(pl_module):
            log.info(labels.line("optimizer", describe_optimizer(trainer.optimizers[0])))
            warn_of_ignored(pl_module, self.typed)
        self.first_step = trainer.global_step
        for logger in trainer.loggers:
            if discard_after := getattr(logger, "discard_after", None):
                discard_after(self.first_step)
        net = pl_module.net if isinstance(pl_module, LanguageModel) else None
        self.speed = Speed(self.lengths, trainer, net)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        set_log_interval(trainer, self.every_n_steps)
        self._leave(trainer)
        if self._is_paused:  # a step's time is training's alone
            self.speed.start()
            self._is_paused = False

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Measures the norm of a module that clips in its own way, or not at all."""
        self.lr = optimizer.param_groups[0].get("lr", 0.0)
        if not clips_by_strategy(trainer, pl_module):
            strategy_of(trainer).clip(optimizer, None)

    def check_finite(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Check the norm of all gradients between clipping and the optimizer's step.

        The norm is the same on all ranks, and not finite where any gradient of any rank is not.
        Under 16-mixed the loss scaler itself skips steps with infinite gradients, by design.

        Raises: NonFiniteError, on all ranks; DataError for a first step without a target.
        """
        self.missing_targets.check_step(trainer)
        strategy = strategy_of(trainer)
        norm = cast(Tensor, strategy.grad_norm)
        if trainer.precision == "16-mixed":
            return
        if math.isfinite(float(norm)):
            self.n_skipped = 0
            return
        mine = trainer.global_rank, [float(loss) for loss in strategy.micro_losses]
        theirs = gather(mine, strategy.parallel.step_group)  # rank, micro-steps
        guilty = [one for one in theirs if not all(map(math.isfinite, one[1]))]
        step, rank, micro_step = trainer.global_step, None, 0
        if guilty:
            rank, losses = guilty[0]
            micro_step = [math.isfinite(loss) for loss in losses].index(False)
        place = find_first(trainer, micro_step)
        error = NonFiniteError(step, rank, data_of(trainer).step_samples(step, rank), place)
        if self.on_nonfinite == "stop":
            raise error
        self.n_skipped += 1
        if self.n_skipped == self.max_skips:
            error.why = f"; {self.n_skipped} steps in a row were skipped (max_skips)"
            raise error
        if trainer.global_rank == theirs[0][0]:
            log.error("warning: %s; the step is skipped", error)  # no rank but 0 logs less
        optimizer.zero_grad(set_to_none=True)  # it passes over parameters without a gradient

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._beat(trainer.global_step, "train")
        if not ends_step(trainer, batch_idx):
            return
        strategy_of(trainer).is_updating = False
        self._ask(trainer)
        step = trainer.global_step
        if step == self.lengths.n_steps:
            trainer.should_stop = True  # Lightning then validates and logs, whatever the interval
        is_due = step % self.every_n_steps == 0 or step - 1 == self.first_step
        if is_due or is_validated(trainer, step) or trainer.should_stop:
            set_log_interval(trainer, 1)  # until the next batch
            self._log_step(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log(STEP, float(trainer.global_step))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._beat(phase="end")
        self.votes.close()  # nobody leaves a collective behind

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ended = why_ended(trainer, self.lengths, self.first_step)
        if self.first_step is not None:
            log_note(trainer, "ended", ", ".join(self.ended.values()))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        log_note(trainer, "ended", f"{type(exception).__name__}: {first_line(exception)}")
        if self.guard is not None and trainer.training and trainer.fit_loop.batch_idx >= 0:
            step, rank = trainer.global_step, trainer.global_rank
            samples = data_of(trainer).step_samples(step, rank)
            self.guard.doing = f"step {step}, of whose samples rank {rank} has {shorten(samples)}"

    # Evaluations

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._beat(phase="validate", allow_s=self.first_s)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            if self.checkpoints is not None:
                self.checkpoints.before_validation(trainer)
            self._leave(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._beat(phase="test" if trainer.testing else "validate")
        if trainer.state.fn != "fit":
            if self.guard is not None:
                self.guard.leave_if_asked()
        elif not trainer.sanity_checking:
            self._ask(trainer)
            self._leave(trainer)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = {}
        if isinstance(pl_module, LanguageModel):  # also where a subclass overrides this very hook
            values = pl_module.take_evaluation("test" if trainer.testing else "val")
        if not values and not trainer.sanity_checking:
            check_evaluated(trainer)
        # Also in the sanity check, which no logger sees: what cannot be logged fails there.
        step = trainer.global_step or self.evaluated_step
        pl_module.log_dict({**values, STEP: float(step)}, add_dataloader_idx=False)

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_paused = True
        self._beat(phase="train")

    # Checkpoints

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["model"] = self.model_config
        self._is_paused = True

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            self.evaluated_step = checkpoint["global_step"]

    def _log_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, strategy = trainer.global_step, strategy_of(trainer)
        if strategy.micro_losses and not self.missing_targets.is_last:
            theirs = not isinstance(trainer.progress_bar_callback, ProgressBar | None)
            pl_module.log("train/loss", strategy.step_loss(), sync_dist=True, prog_bar=theirs)
        speed = self.speed.read()
        if strategy.grad_norm is not None:
            pl_module.log("grad_norm", strategy.grad_norm)
        if isinstance(bar := trainer.progress_bar_callback, ProgressBar):
            # Of prog_bar=True Lightning would read the loss from its device at every micro-batch.
            bar.logged = {"train/loss": trainer.callback_metrics.get("train/loss", "")}
            bar.logged["lr"] = f"{self.lr:.3g}"
            bar.logged[f"{self.lengths.unit}/s"] = f"{speed['perf/tokens_per_s']:,.0f}"
            if self.lengths.n_steps:
                left_s = (self.lengths.n_steps - step) * speed["perf/step_s"]
                bar.logged["left"] = timedelta(seconds=round(left_s))
        # Of a plain float Lightning keeps fp32: tokens are counted in billions.
        numbers = {"lr": self.lr, STEP: float(step), **speed}.items()
        pl_module.log_dict({k: torch.as_tensor(v, dtype=torch.float64) for k, v in numbers})

    def _beat(self, *place: Any, **more: Any) -> None:
        """Tells the watchers that the run gets on."""
        if self.guard:
            self.guard.heartbeat.beat(*place, **more)

    def _ask(self, trainer: Trainer) -> None:
        """Vote on leaving and on saving, and act on the answers, which are equal on all ranks."""
        wants_stop = self.guard is not None and bool(self.guard.stop)
        wants_save = self.checkpoints is not None and self.checkpoints.votes_to_save(trainer)
        stops, saves = self.votes.ask(wants_stop, wants_save) or (False, False)
        self.stopping |= stops
        if self.checkpoints is not None:
            self.checkpoints.stopping |= stops
            self.checkpoints.time_is_up |= saves

    def _leave(self, trainer: Trainer) -> None:
        """Raises: PreemptedError, once all ranks know; the step is saved.

        After the last step it is saved only: what is left is the validation, which is the end.
        """
        if not self.stopping or (trainer.validating and acts_on_validation(trainer)):
            return
        if self.checkpoints is None:
            raise PreemptedError
        if self.checkpoints.saved[0] < trainer.global_step:
            self.checkpoints.save(trainer, validated=False)
        self.checkpoints.finish(trainer)
        if trainer.global_step != trainer.max_steps:
            raise PreemptedError(trainer.global_step)


OURS = (
    TrainingMonitor,
    Checkpoints,
    ProgressBar,
)  # none of them begins in a validation what its end undoes


def acts_on_validation(trainer: Trainer) -> bool:
    """Whether a callback or the module does at a validation's start what its end has to undo.

    As WeightAveraging, which validates its averages: such a validation is not left in its middle.
    """
    hooks = ("on_validation_start", "on_validation_epoch_start")
    parts = (*callbacks_of(trainer), trainer.lightning_module)
    theirs = [part for part in parts if type(part) not in OURS]
    return any(is_overridden(hook, part) for part in theirs for hook in hooks)


def clips_by_strategy(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether Lightning's clipping of this module ends in our strategy's, which measures."""
    if not isinstance(pl_module, LanguageModel) or trainer.gradient_clip_algorithm == "value":
        return False
    return not is_overridden("configure_gradient_clipping", pl_module)


def why_ended(trainer: Trainer, lengths: RunLengths, first_step: int | None) -> dict[str, str]:
    """Why a fit that has come to its end did, as the result line and result.json say it.

    `reason` is one of "steps done", "epochs done", "tokens done", "max_time", "early stop",
    "stopped", "nothing left to train"; `detail` the option, the metric with its value, or who.

    Args:
        first_step: where it began; None where no step was left.
    """
    step, detail = trainer.global_step, f"at step {trainer.global_step}"
    timers = (part for part in callbacks_of(trainer) if isinstance(part, Timer))
    early = [part for part in trainer.early_stopping_callbacks if part.stopping_reason.value]
    if first_step is None:
        reason = "nothing left to train"
        detail = f"step {step} was the run's last; further: trainer.max_steps, trainer.max_epochs"
    elif step == lengths.n_steps:
        reason, detail = f"{lengths.limit_kind} done", lengths.limit
    elif any((timer.time_remaining() or 1.0) <= 0 for timer in timers):
        reason = "max_time"
    elif early:
        metric = early[0].monitor
        why = early[0].stopping_reason.name.lower().replace("_", " ")
        reason = "early stop"
        detail = f"{metric}={trainer.callback_metrics[metric]:.4g} {why}, {detail}"
    else:
        reason, detail = "stopped", f"by a callback or the module (trainer.should_stop), {detail}"
    return {"reason": reason, "detail": detail}


def log_note(trainer: Trainer, name: str, text: str) -> None:
    """Gives a text to the loggers that take any, at this step."""
    for logger in trainer.loggers:
        if log := getattr(logger, "log_note", None):
            log(name, text, trainer.global_step)

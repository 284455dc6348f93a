"""Logs a training step, the x axis of all that is logged, and why the training ended."""

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from torch import Tensor
from torch.optim import Optimizer

from gptrain.lengths import Lengths
from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.lightning import ends_step, is_validated
from gptrain.lit.module import LanguageModel
from gptrain.lit.perf import Speed
from gptrain.lit.strategies.base import check_optimization
from gptrain.problems import first_line

STEP = "step"  # Lightning takes a logged value of this name for the x axis, and logs no epoch then


class StepLog(Callback):
    """train/loss, lr, grad_norm, tokens and perf/* every `every_n_steps` optimizer steps.

    Of the first step too, which is slower than others, and of those that are validated.
    First of all callbacks, so that the others find these values in `trainer.callback_metrics`:
    those of the last step that was logged or validated. They are logged by `self.log`, so that what
    a module or a callback logs goes into the same row.

    Args:
        lengths: of the run; its last step is logged too, and then validated.
        model_config: of the config's `model` group; kept in every checkpoint file, so that a file
            on its own can be loaded.

    Attributes:
        speed, first_step: clock, and steps done, when training began; None: nothing was left.
        ended: why a training did, `reason` and `detail`.
    """

    speed: Speed | None = None
    first_step: int | None = None
    ended: dict[str, str] | None = None

    def __init__(self, every_n_steps: int, lengths: Lengths, model_config: dict[str, Any]):
        self.every_n_steps, self.lengths = every_n_steps, lengths
        self.model_config = model_config
        self.lr, self._is_paused = 0.0, False
        self.evaluated_step = 0  # of the checkpoint that is evaluated

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        check_optimization(module)  # again: hooks may have changed it
        self.first_step = trainer.global_step
        for logger in trainer.loggers:
            if hasattr(logger, "go_on_from"):
                logger.go_on_from(self.first_step)
        net = module.net if isinstance(module, LanguageModel) else None
        self.speed = Speed(self.lengths, trainer, net)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if self._is_paused:  # a step's time is training's alone
            self.speed.start()
            self._is_paused = False

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer
    ) -> None:
        self.lr = optimizer.param_groups[0].get("lr", 0.0)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not ends_step(trainer, batch_idx):
            return
        step, strategy = trainer.global_step, trainer.strategy
        if step == self.lengths.n_steps:
            trainer.should_stop = True  # Lightning then validates and logs, whatever the interval
        is_due = step % self.every_n_steps == 0 or step == self.first_step + 1
        if not (is_due or is_validated(trainer, step) or trainer.should_stop):
            return
        strategy.check_finite.resolve_pending()
        if losses := strategy.micro_losses:  # over the number of micro-steps already
            loss = torch.stack(losses).mean() * trainer.accumulate_grad_batches
            theirs = not isinstance(trainer.progress_bar_callback, ProgressBar | None)
            module.log("train/loss", loss, sync_dist=True, prog_bar=theirs)
        metrics = {"lr": self.lr, STEP: float(step)}
        if strategy.grad_norm is not None:
            metrics["grad_norm"] = strategy.grad_norm
        metrics |= self.speed.read()
        if isinstance(bar := trainer.progress_bar_callback, ProgressBar):
            # Of prog_bar=True Lightning would read the loss from its device at every micro-batch.
            bar.logged = {"train/loss": trainer.callback_metrics.get("train/loss", "")}
            bar.logged["lr"] = f"{self.lr:.3g}"
            bar.logged["tokens/s"] = f"{metrics['perf/tokens_per_s']:,.0f}"
            if self.lengths.n_steps:
                left_s = (self.lengths.n_steps - step) * metrics["perf/step_s"]
                bar.logged["left"] = timedelta(seconds=round(left_s))
        module.log_dict({name: exact(value) for name, value in metrics.items()})

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log(STEP, float(trainer.global_step))

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.ended = why_ended(trainer, self.lengths, self.first_step)
        if self.first_step is not None:
            log_note(trainer, "ended", ", ".join(self.ended.values()))

    def on_exception(self, trainer: Trainer, module: LightningModule, error: Exception) -> None:
        log_note(trainer, "ended", f"{type(error).__name__}: {first_line(error)}")

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._log_evaluation(trainer, module, "val")

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._log_evaluation(trainer, module, "test")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._is_paused = True

    def on_save_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["model"] = self.model_config
        self._is_paused = True

    def on_load_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            self.evaluated_step = checkpoint["global_step"]

    def _log_evaluation(self, trainer: Trainer, module: LightningModule, prefix: str) -> None:
        values = {}
        if isinstance(module, LanguageModel):  # also where a subclass overrides this very hook
            values = module.take_evaluation(prefix)
        if not trainer.sanity_checking:  # a few batches, before the first step
            step = trainer.global_step or self.evaluated_step
            module.log_dict({**values, STEP: float(step)}, add_dataloader_idx=False)


def exact(value: float | Tensor) -> Tensor:
    """The value as Lightning keeps it without rounding to fp32: tokens are counted in billions."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def why_ended(trainer: Trainer, lengths: Lengths, first_step: int | None) -> dict[str, str]:
    """Why a fit that has come to its end did, as the result line and result.json say it.

    `reason` is one of "steps done", "epochs done", "tokens done", "max_time", "early stop",
    "stopped", "nothing left to train"; `detail` the option, the metric with its value, or who.

    Args:
        first_step: where it began; None where no step was left.
    """
    step, detail = trainer.global_step, f"at step {trainer.global_step}"
    timers = (part for part in trainer.callbacks if isinstance(part, Timer))
    early = [part for part in trainer.early_stopping_callbacks if part.stopping_reason.value]
    if first_step is None:
        reason = "nothing left to train"
        detail = f"step {step} was the run's last; further: trainer.max_steps, trainer.max_epochs"
    elif step == lengths.n_steps:
        kind = lengths.limit.partition("=")[0].rpartition("max_")[2]  # of trainer.max_epochs=3
        reason, detail = f"{kind} done", lengths.limit
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
        if hasattr(logger, "log_note"):
            logger.log_note(name, text, trainer.global_step)

"""Logs a training step, and the x axis of all that is logged: the optimizer step."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.lightning import ends_step
from gptrain.lit.module import LanguageModel
from gptrain.lit.perf import Peak, find_peak, net_flops_per_token
from gptrain.lit.strategies.base import check_optimization
from gptrain.plan import Lengths

STEP = "step"  # Lightning takes a logged value of this name for the x axis, and logs no epoch then


class StepLog(Callback):
    """train/loss, lr, grad_norm, tokens and perf/* every `every_n_steps` optimizer steps.

    First of all callbacks, so that the others find these values in `trainer.callback_metrics`:
    those of the last step that was logged or validated. They are logged by `self.log`, so that what
    a module or a callback logs goes into the same row.

    Args:
        lengths: of the run; its last step is logged too, and then validated.
        model_config: of the config's `model` group; kept in every checkpoint file, so that a file
            on its own can be loaded.

    Attributes:
        peak: of one device, what perf/mfu is measured against; known on rank 0 once training.
        first_step: steps done when training began; None where nothing was left to train.
    """

    peak: Peak | None = None
    first_step: int | None = None

    def __init__(self, every_n_steps: int, lengths: Lengths, model_config: dict[str, Any]):
        self.every_n_steps, self.lengths = every_n_steps, lengths
        self.model_config = model_config
        self.losses: list[Tensor] = []  # one of each micro-step of this step
        self.lr = 0.0
        self.token_flops: int | None = None
        self.last_step, self.last_s, self.last_waited_s = 0, 0.0, 0.0
        self.evaluated_step = 0  # of the checkpoint that is evaluated

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        check_optimization(module)  # again: hooks may have changed it
        here = trainer.global_step
        for logger in trainer.loggers:
            if hasattr(logger, "go_on_from"):
                logger.go_on_from(here)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.peak = find_peak(trainer.strategy.root_device, trainer.precision)
        self.first_step = self.last_step = here
        self.last_s, self.last_waited_s = time.perf_counter(), trainer.datamodule.waited_s

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer
    ) -> None:
        self.lr = optimizer.param_groups[0]["lr"] if optimizer.param_groups else 0.0

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.losses.append(outputs["loss"])  # over the number of micro-steps already
        if not ends_step(trainer, batch_idx):
            return
        step, strategy = trainer.global_step, trainer.strategy
        if step == self.lengths.n_steps:
            trainer.should_stop = True  # Lightning then validates and logs, whatever the interval
        is_logged = step % self.every_n_steps == 0 or trainer.should_stop
        is_first, is_validated = (
            step == self.first_step + 1,
            step % self.lengths.validate_every == 0,
        )
        loss = self._take_loss(trainer)
        if not (is_logged or is_first or is_validated):
            return
        strategy.check_finite.resolve_pending()
        if loss is not None:
            loss, bar = mean_over_ranks(loss), trainer.progress_bar_callback
            if isinstance(bar, ProgressBar):
                bar.loss = loss  # Lightning would read it from the device at every micro-batch
            theirs = bar is not None and not isinstance(bar, ProgressBar)
            module.log("train/loss", loss, prog_bar=theirs)
        metrics = {"lr": self.lr, STEP: float(step)}
        if strategy.grad_norm is not None:
            metrics["grad_norm"] = strategy.grad_norm
        if is_logged:
            metrics |= self._perf(trainer, module, step)
        module.log_dict({name: exact(value) for name, value in metrics.items()})

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log(STEP, float(trainer.global_step))

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.validation_s = time.perf_counter()

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._log_evaluation(trainer, module, "val")

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._log_evaluation(trainer, module, "test")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.last_s += time.perf_counter() - self.validation_s  # a step's time is training's alone

    def on_save_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["model"] = self.model_config

    def on_load_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            self.evaluated_step = checkpoint["global_step"]
            checkpoint.pop("loops", None)  # of training; an evaluation begins at its first batch

    def _log_evaluation(self, trainer: Trainer, module: LightningModule, prefix: str) -> None:
        values = {}
        if isinstance(module, LanguageModel):  # also where a subclass overrides this very hook
            values = module.take_evaluation(prefix)
        if not trainer.sanity_checking:  # a few batches, before the first step
            step = trainer.global_step or self.evaluated_step
            module.log_dict({**values, STEP: float(step)}, add_dataloader_idx=False)

    def _take_loss(self, trainer: Trainer) -> Tensor | None:
        """Mean over this rank's micro-steps; of those that returned a loss."""
        if not self.losses:
            return None
        loss = torch.stack(self.losses).mean() * trainer.accumulate_grad_batches
        self.losses.clear()
        return loss

    def _perf(self, trainer: Trainer, module: LightningModule, step: int) -> dict[str, float]:
        """Of the steps since the last that was logged."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # the clock is read when the step is done
        now_s, step_tokens = time.perf_counter(), self.lengths.step_tokens
        waited_s, n_steps = trainer.datamodule.waited_s, max(1, step - self.last_step)
        step_s = (now_s - self.last_s) / n_steps
        wait_s = (waited_s - self.last_waited_s) / n_steps
        self.last_step, self.last_s, self.last_waited_s = step, now_s, waited_s
        metrics = {
            "tokens": float(step * step_tokens),
            "perf/tokens_per_s": step_tokens / step_s,
            "perf/step_s": step_s,
            "perf/data_wait_s": wait_s,
        }
        if isinstance(module, LanguageModel) and self.token_flops is None:
            stages = trainer.strategy.stages
            self.token_flops = net_flops_per_token(module.net, self.lengths.sample_tokens, stages)
        if self.peak is not None and self.token_flops:
            flops_per_s = self.token_flops * step_tokens / step_s / trainer.world_size
            metrics["perf/mfu"] = flops_per_s / self.peak.flops_per_s
        if trainer.strategy.root_device.type == "cuda":
            metrics["perf/gpu_mem_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return metrics


def exact(value: float | Tensor) -> Tensor:
    """The value as Lightning keeps it without rounding to fp32: tokens are counted in billions."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def mean_over_ranks(loss: Tensor) -> Tensor:
    """Mean of every rank's loss; ranks that share their samples have it alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return loss
    loss = loss / dist.get_world_size()
    dist.all_reduce(loss)
    return loss

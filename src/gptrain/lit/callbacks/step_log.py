"""Logs a training step, and does nothing at all on the steps between."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from gptrain.lit.module import LanguageModel


class StepLog(Callback):
    """train/loss, lr, grad_norm, tokens and perf/* every `every_n_steps` optimizer steps.

    Lightning's `self.log` costs about a millisecond a step on a slow core even where nothing is
    logged, so the loggers are called directly.

    Args:
        global_batch_size: sequences per optimizer step.
        n_steps: of the run; its last step is logged too, and then validated.
    """

    def __init__(self, every_n_steps: int, global_batch_size: int, n_steps: int | None):
        self.every_n_steps = every_n_steps
        self.global_batch_size = global_batch_size
        self.n_steps = n_steps
        self.last_step, self.last_s = 0, 0.0

    def on_train_start(self, trainer: Trainer, module: LanguageModel) -> None:
        self.last_step, self.last_s = trainer.global_step, time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LanguageModel, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if trainer.fit_loop._should_accumulate():
            return
        if step == self.n_steps:
            trainer.should_stop = True  # Lightning then validates, whatever the interval
        elif step % self.every_n_steps:
            module.step_losses.clear()
            return
        tokens, _ = batch
        loss = module.take_train_loss()
        if trainer.world_size > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG if loss.is_cuda else dist.ReduceOp.SUM)
            loss = loss if loss.is_cuda else loss / trainer.world_size
        now_s, step_tokens = time.perf_counter(), self.global_batch_size * tokens.shape[1]
        step_s = (now_s - self.last_s) / max(1, step - self.last_step)
        self.last_step, self.last_s = step, now_s
        metrics = {
            "train/loss": loss.item(),
            "lr": self._rate(trainer, module, step),
            "grad_norm": float(module.grad_norm),
            "tokens": step * step_tokens,
            "perf/tokens_per_s": step_tokens / step_s,
            "perf/step_s": step_s,
        }
        if loss.is_cuda:
            metrics["perf/gpu_mem_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        module.logged |= metrics
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def _rate(self, trainer: Trainer, module: LanguageModel, step: int) -> float:
        """The learning rate that this step took; the optimizer already has the next one's."""
        (scheduled,) = trainer.lr_scheduler_configs
        return scheduled.scheduler.base_lrs[0] * module.schedule(step - 1)

"""Logs a training step, and does nothing at all on the steps between."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from gptrain.lit.module import LanguageModel
from gptrain.lit.speed import Peak, find_peak, net_flops_per_token
from gptrain.lit.trainer import FetchClock


class StepLog(Callback):
    """train/loss, lr, grad_norm, tokens and perf/* every `every_n_steps` optimizer steps.

    Lightning's `self.log` costs about a millisecond a step on a slow core even where nothing is
    logged, so the loggers are called directly.

    Args:
        global_batch_size: sequences per optimizer step.
        n_steps: of the run; its last step is logged too, and then validated.

    Attributes:
        peak: of one device, what perf/mfu is measured against; known on rank 0 once training.
        first_step: steps done when training began; None where nothing was left to train.
    """

    peak: Peak | None = None
    first_step: int | None = None

    def __init__(self, every_n_steps: int, global_batch_size: int, n_steps: int | None):
        self.every_n_steps = every_n_steps
        self.global_batch_size = global_batch_size
        self.n_steps = n_steps
        self.fetches: FetchClock | None = None
        self.token_flops: int | None = None
        self.last_step, self.last_s, self.last_waited_s = 0, 0.0, 0.0

    def on_train_start(self, trainer: Trainer, module: LanguageModel) -> None:
        self.fetches = FetchClock(trainer)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.peak = find_peak(module.device, trainer.precision)
        self.first_step = self.last_step = trainer.global_step
        self.last_s = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, module: LanguageModel) -> None:
        self.validation_s = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, module: LanguageModel) -> None:
        self.last_s += time.perf_counter() - self.validation_s  # a step's time is training's alone

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
        module.check_finite.settle()
        tokens, _ = batch
        loss = module.take_train_loss()
        if trainer.world_size > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG if loss.is_cuda else dist.ReduceOp.SUM)
            loss = loss if loss.is_cuda else loss / trainer.world_size
        train_loss = loss.item()  # waits for the device: the clock is read when the step is done
        now_s, step_tokens = time.perf_counter(), self.global_batch_size * tokens.shape[1]
        n_steps, waited_s = max(1, step - self.last_step), self.fetches.waited_s
        step_s = (now_s - self.last_s) / n_steps
        wait_s = (waited_s - self.last_waited_s) / n_steps
        self.last_step, self.last_s, self.last_waited_s = step, now_s, waited_s
        metrics = {
            "train/loss": train_loss,
            "lr": module.rate_after(step - 1),  # the optimizer already has the next one
            "grad_norm": float(module.grad_norm),
            "tokens": step * step_tokens,
            "perf/tokens_per_s": step_tokens / step_s,
            "perf/step_s": step_s,
            "perf/data_wait_s": wait_s,
        }
        if self.token_flops is None:
            stages = getattr(trainer.strategy, "stages", None)
            self.token_flops = net_flops_per_token(module.net, tokens.shape[1], stages)
        if self.peak is not None:
            flops_per_s = self.token_flops * step_tokens / step_s / trainer.world_size
            metrics["perf/mfu"] = flops_per_s / self.peak.flops_per_s
        if loss.is_cuda:
            metrics["perf/gpu_mem_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        module.tell(metrics)

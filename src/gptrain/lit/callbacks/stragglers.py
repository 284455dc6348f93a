"""Finds the rank that the others wait for."""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from gptrain.lit.lightning import ends_step

log = logging.getLogger(__name__)
SLOW, SLOW_S = 1.5, 0.1  # times the median of the others, and seconds above it
IN_A_ROW = 3  # logged steps: one slow step is an accident


class Stragglers(Callback):
    """Warns once of each rank that is slow from its last step's end to its backward pass.

    Data, copies and the forward pass fall into that time. Under ddp it is a rank's own; where the
    forward pass itself waits for others, as with fsdp, all ranks are slow alike and nothing is
    said. It is taken on logged steps only, on a GPU from its own clock.
    """

    def __init__(self, every_n_steps: int):
        self.every_n_steps = every_n_steps
        self.started: float | torch.cuda.Event | None = None
        self.ended: float | torch.cuda.Event | None = None
        self.slow_rank, self.times = -1, 0
        self.warned: set[int] = set()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if self.started is None:  # of the first step of all
            self.started = read_clock(trainer.strategy.root_device)

    def on_before_backward(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if (trainer.global_step + 1) % self.every_n_steps == 0:
            self.ended = read_clock(trainer.strategy.root_device)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.ended is not None and ends_step(trainer, batch_idx):
            mine = torch.tensor(
                [seconds_between(self.started, self.ended)], device=trainer.strategy.root_device
            )
            all_ranks = [torch.empty_like(mine) for _ in range(trainer.world_size)]
            dist.all_gather(all_ranks, mine)
            self.ended = None
            if trainer.is_global_zero:
                self.judge(trainer.global_step, [float(seconds) for seconds in all_ranks])
        self.started = read_clock(trainer.strategy.root_device)

    def judge(self, step: int, seconds: list[float]) -> None:
        """Counts how often in a row the same rank was slow, by each rank's seconds."""
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = median(seconds[:slowest] + seconds[slowest + 1 :])
        is_slow = seconds[slowest] > max(SLOW * others, SLOW_S + others)
        self.times = self.times + 1 if is_slow and slowest == self.slow_rank else int(is_slow)
        self.slow_rank = slowest if is_slow else -1
        if self.times == IN_A_ROW and slowest not in self.warned:
            self.warned.add(slowest)
            log.warning(
                "warning: rank %d keeps the others waiting: at step %d it took %.2g s to its "
                "backward pass, %.1f times what the others take",
                slowest,
                step,
                seconds[slowest],
                seconds[slowest] / others,
            )


def read_clock(device: torch.device) -> float | torch.cuda.Event:
    """Now, by the clock of the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Waits for the device where the clock is a GPU's; both ends are of the same kind."""
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3

"""Callbacks as a Lightning user writes them. They append their observations to seen.jsonl."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from lightning.pytorch import Callback

from gptrain.assemble import report

SEEN = "seen.jsonl"


def note(trainer, **what) -> None:
    if trainer.is_global_zero:
        with open(Path(trainer.default_root_dir) / SEEN, "a") as file:
            file.write(json.dumps(what) + "\n")


class SeesAll(Callback):
    """Records callback_metrics, the gradients and the output of training_step."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in grads]).norm()) if grads else 0.0
        note(trainer, hook="before_step", n_grads=len(grads), norm=norm,
             lr=float(optimizer.param_groups[0]["lr"]))  # fmt: skip

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        keys = sorted(outputs) if isinstance(outputs, dict) else str(type(outputs))
        note(trainer, hook="batch_end", step=trainer.global_step, metrics=values(trainer),
             outputs=keys, bar=sorted(trainer.progress_bar_metrics))  # fmt: skip

    def on_validation_epoch_end(self, trainer, module):
        note(trainer, hook="validation_epoch_end", metrics=values(trainer))

    def on_validation_end(self, trainer, module):
        note(trainer, hook="validation_end", metrics=values(trainer))


def values(trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Logs(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.log("mine/batch_end", float(batch_idx))
        module.log("mine/loss", outputs["loss"], on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, trainer, module):
        self.log("mine/val", 7.0)


class FailsInHook(Callback):
    """Raises in one of the hooks, on one rank or on all."""

    def __init__(self, hook, step, rank=None):
        self.step, self.rank = step, rank
        setattr(self, hook, self.fail)

    def fail(self, trainer, *_):
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank):
            raise RuntimeError("the callback is broken")


class OneRankPerNode(Callback):
    """Makes each rank the only one of its node: only the global ranks then differ."""

    def setup(self, trainer, module, stage):
        trainer.strategy.cluster_environment.local_rank = lambda: 0


class SetsPeakMemory(Callback):
    """Makes a rank of a run report a peak memory of 1 GiB, and the next rank one of 2 GiB."""

    def setup(self, trainer, module, stage):
        report.peak_memory_bytes = lambda _: 2**30 * (1 + trainer.global_rank)


class Signals(Callback):
    """Sends SIGTERM to this process, once, in one of the hooks."""

    def __init__(self, step, hook):
        self.step, self.sent = step, False
        setattr(self, hook, self.send)

    def send(self, trainer, *_):
        if trainer.global_step == self.step and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


class Fails(Callback):
    """Raises an exception at step 3."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            raise RuntimeError("step 3")


class BreaksLayer(Callback):
    """Makes the output of a layer non-finite from step 2 on."""

    def __init__(self, layer):
        self.layer = layer

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2:
            part = pl_module.net.get_submodule(self.layer)
            part.register_forward_hook(lambda module, inputs, output: output * float("nan"))


class SpikesLoss(Callback):
    """Multiplies loss and gradient by 100 in some steps, on the last rank."""

    def __init__(self, steps):
        self.steps = steps

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step in self.steps and trainer.global_rank == trainer.world_size - 1:
            loss.register_hook(loss.data.mul_(100.0).new_tensor(100.0).mul)

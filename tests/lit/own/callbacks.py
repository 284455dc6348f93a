"""Callbacks as a Lightning user writes them. They append their observations to seen.jsonl."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from lightning.pytorch import Callback

from gptrain.lit import report

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


class Saves(Callback):
    """Calls trainer.save_checkpoint at step 3."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "x.ckpt")


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


class Counts(Callback):
    """Keeps three options and two counters in its state; one counter is also an argument."""

    def __init__(self, every, scale=1.0, start=0, limit=3):
        self.every, self._scale, self.start, self.count = every, scale, start, 0
        self.more = {"limit": limit}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1
        self.start += 1
        counters = {"start": self.start, "count": self.count}
        note(trainer, every=self.every, scale=self._scale, **self.more, **counters)

    def state_dict(self):
        return {name: getattr(self, name) for name in ("every", "_scale", "start", "count", "more")}

    def load_state_dict(self, state):
        vars(self).update(state)


class BreaksLayer(Callback):
    """Makes a layer's weight, output or output's gradient non-finite from step 2 on.

    At "bf16 output" only an output of mixed precision becomes non-finite. With `rank`, only that
    rank has non-finite values of its own.
    """

    def __init__(self, layer, at, rank=None):
        self.layer, self.at, self.rank = layer, at, rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != 2 or self.rank not in (None, trainer.global_rank):
            return
        part = pl_module.net.get_submodule(self.layer)
        if self.at == "weight":
            part.weight.data[0, 0] = float("nan")
        elif self.at == "output":
            part.register_forward_hook(lambda module, inputs, output: output * float("nan"))
        elif self.at == "bf16 output":
            part.register_forward_hook(self.break_bf16)
        else:
            part.register_forward_hook(self.break_gradient)

    def break_bf16(self, module, inputs, output):
        return output * float("nan") if output.dtype == torch.bfloat16 else output

    def break_gradient(self, module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))


class SpikesLoss(Callback):
    """Multiplies loss and gradient by 100 in some steps, on the last rank."""

    def __init__(self, steps):
        self.steps = steps

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step in self.steps and trainer.global_rank == trainer.world_size - 1:
            loss.register_hook(loss.data.mul_(100.0).new_tensor(100.0).mul)

"""Callbacks as a Lightning user writes them. They append their observations to seen.jsonl."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections import OrderedDict
from pathlib import Path

import torch
from lightning.pytorch import Callback

SEEN = "seen.jsonl"
STOP = "TEST_STOP"  # environment variable with the arguments of Stop


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
             outputs=keys)  # fmt: skip

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


class OneRankPerNode(Callback):
    """Makes each rank the only one of its node: only the global ranks then differ."""

    def setup(self, trainer, module, stage):
        trainer.strategy.cluster_environment.local_rank = lambda: 0


class Stop(Callback):
    """Stop the run in a hook of a step, exactly, and not after some time.

    The environment says how, so that the words of a run are those of the run that is not stopped,
    or the arguments say it.

    Args:
        how: Name of a signal that a rank sends to itself, `error` for an exception, `nan` for
            gradients that are not numbers, `should_stop` for Lightning's attribute, or `full` for a
            disk on which no file may have more than 20,000 bytes.
        at: Name of a hook, or `in_save` for the moment in which a checkpoint's file is written.
        step: Number of steps that are done.
        rank: Rank that does it.
    """

    def __init__(self, how="", at="", step=0, rank=0):
        self.is_done = False
        if options := os.environ.get(STOP):
            how, at, step, rank = json.loads(options)
        self.how, self.step, self.rank = how, step, rank
        if at == "in_save":
            self.on_save_checkpoint = self.add_to_save
        elif at:
            setattr(self, at, self.stop)

    def is_due(self, trainer):
        return (trainer.global_step, trainer.global_rank) == (self.step, self.rank)

    def stop(self, trainer, module=None, loss=None, *_):
        if self.is_due(trainer) and not self.is_done:
            self.is_done = True
            if self.how == "nan":
                loss.register_hook(lambda gradient: gradient * float("nan"))
            elif self.how == "should_stop":
                trainer.should_stop = True
            else:
                self.act()

    def add_to_save(self, trainer, module, checkpoint):
        if self.is_due(trainer):
            checkpoint["stop"] = WhenWritten(self.act)

    def act(self):
        if self.how == "error":
            raise RuntimeError("the run was to end here")
        if self.how == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        else:
            os.kill(os.getpid(), signal.Signals[self.how])


class WhenWritten:
    """An object that calls a function when it is pickled."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        self.function()
        return OrderedDict, ()


class Draws(Callback):
    """Draws random numbers in most hooks, logs them and keeps a state."""

    def __init__(self):
        self.n_drawn, self.mean = 0, torch.zeros(2)

    def draw(self, *_):
        self.n_drawn += 1
        self.mean = 0.5 * self.mean + torch.rand(2)

    on_train_batch_start = on_train_epoch_start = on_validation_batch_end = draw
    on_train_epoch_end = draw

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.draw()
        self.log("drawn", self.mean[0])

    def state_dict(self):
        return {"n_drawn": self.n_drawn, "mean": self.mean}

    def load_state_dict(self, state):
        self.n_drawn, self.mean = state["n_drawn"], state["mean"]


class Freezes(Callback):
    """Freezes the first block after the third step, once."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            module.net.blocks[0].requires_grad_(False)


class BreaksLayer(Callback):
    """Makes the output of a layer non-finite from step 2 on."""

    def __init__(self, layer: str | torch.nn.Module):
        self.layer = layer

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2:
            part = pl_module.net.get_submodule(self.layer)
            part.register_forward_hook(lambda module, inputs, output: output * float("nan"))


class SpikesLoss(Callback):
    """Multiplies loss and gradient by a factor in some steps, on the last rank."""

    def __init__(self, steps, factor=100.0):
        self.steps, self.factor = steps, factor

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step in self.steps and trainer.global_rank == trainer.world_size - 1:
            loss.register_hook(loss.data.mul_(self.factor).new_tensor(self.factor).mul)

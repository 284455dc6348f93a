"""Faults inside a rank. A callback that is named on the command line causes them."""

from __future__ import annotations

import errno
import hashlib
import itertools
import math
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

HOOKS = {  # phase -> the hook of a callback in which the fault happens
    "setup": "setup", "start": "on_train_start", "forward": "on_train_batch_start",
    "backward": "on_before_backward", "clip": "on_before_optimizer_step",
    "log": "on_train_batch_end", "validation": "on_validation_batch_start",
    "save": "on_save_checkpoint", "end": "on_train_end", "teardown": "teardown",
}  # fmt: skip
OPERATIONS = ("open", "write", "fsync", "mkdir", "rename")  # functions of `os` that a save calls


class Fault(Callback):
    """One fault in one rank, once per run folder. trial.Scenario describes the options."""

    def __init__(self, **options: Any):
        vars(self).update(options)

    def enter(self, phase: str, trainer: Trainer, module: Any, *details: Any, **_: Any) -> None:
        """Cause the fault if the phase, rank and step match. Every hook calls this method."""
        is_due = phase == self.phase and self.rank == trainer.global_rank
        marker = Path(trainer.default_root_dir) / "planted"
        if not is_due or trainer.global_step < self.step or (marker.exists() and not self.always):
            return
        marker.touch()
        act = partial(self.perform, trainer, *details)
        break_operation(self.operation, act) if self.operation else act()

    def perform(self, trainer: Trainer, *details: Any) -> None:
        if self.act.startswith("SIG"):
            if self.target == "group":  # data workers accept signals of their own rank
                return outside(f"kill -{self.act[3:]} -- -{os.getpgid(0)}")
            pid = os.getpid() if self.target == "rank" else os.getppid()
            os.kill(pid, signal.Signals[self.act])
        elif self.act.startswith("E"):
            raise OSError(number := getattr(errno, self.act), os.strerror(number))
        else:
            ACTS[self.act](trainer, *details)


for phase, name in HOOKS.items():
    setattr(Fault, name, partialmethod(Fault.enter, phase))


def outside(script: str) -> None:
    """Run a shell script in a process that continues while this process is stopped."""
    subprocess.Popen(["sh", "-c", script])


def fail(*_: Any) -> None:
    raise AssertionError("planted")


def fill_log(trainer: Trainer, *_: Any) -> None:
    """Make TensorBoard's file, which is opened for each write, a link to a full device."""
    for path in Path(trainer.default_root_dir).glob("events.out.tfevents.*"):
        path.unlink()
        path.symlink_to("/dev/full")


ACTS: dict[str, Callable[..., Any]] = {
    "fail": fail,
    "fill_log": fill_log,
    "pause": lambda *_: outside("kill -STOP $PPID; sleep 2; kill -CONT $PPID"),
    "interrupt_twice": lambda *_: (
        outside(f"kill -INT {os.getppid()}; sleep 0.6; kill -INT {os.getppid()}"),
        time.sleep(5.0),
    ),
    "poison": lambda _, loss: loss.register_hook(loss.data.fill_(math.nan).mul),
    "overflow": lambda _, loss: loss.register_hook(lambda gradient: gradient * math.inf),
    "exhaust_memory": lambda *_: torch.empty(1 << 50),
    "break_data": lambda trainer, *_: setattr(type(trainer.datamodule.train), "__getitems__", fail),
    "kill_worker": lambda *_: multiprocessing.active_children()[0].kill(),
    "limit_files": lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, -1)),
    "sleep": lambda *_: time.sleep(600.0),
    "call_alone": lambda *_: dist.all_reduce(torch.ones(3)),
    "hold_interpreter": lambda *_: re.match("(a?){40}a{40}", "a" * 40),  # hours in C
}


def break_operation(count: int, act: Callable[[], None]) -> None:
    """Call `act` before the count-th operation of this process in a folder `checkpoints`."""
    seen = itertools.count(1)

    def call(name: str, operation: Callable, place: Any, *args: Any, **options: Any) -> Any:
        path = os.path.realpath(f"/proc/self/fd/{place}" if isinstance(place, int) else place)
        reads = name == "open" and not args[0] & os.O_CREAT
        if not reads and "/checkpoints" in path and next(seen) == count:
            act()
        return operation(place, *args, **options)

    for name in OPERATIONS:
        setattr(os, name, partial(call, name, getattr(os, name)))


class Witness(Callback):
    """Writes a hash of the batch and the loss of each micro-step of each rank into a file."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        seen, loss = hashlib.sha256(batch[0].numpy().tobytes()).hexdigest(), float(outputs["loss"])
        path = Path(trainer.default_root_dir) / f"witness-{trainer.global_rank}.txt"
        with path.open("a") as file:
            file.write(f"{trainer.global_step}.{batch_idx} {seen} {loss.hex()}\n")

"""A fault in a run: put into its code after the fork, as no configuration could.

Beside it every run here has a witness: for each micro-step of each rank, a line with the step, the
batch it saw and the loss it made of it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gptrain.launch.process import this_process
from gptrain.resilience import fileops
from tests.campaign import acts

WITNESS = "witness-{rank}.txt"
PIDS = "pids"  # folder: rank -> its process, and the data workers it has had
PHASES = ("setup", "data", "forward", "backward", "clip", "log", "validation", "save", "teardown")


@dataclass(frozen=True)
class Fault:
    """What happens on one rank.

    Attributes:
        act: name of a function in `acts`.
        rank: of the rank it happens on; None: all.
        phase: one of PHASES; "time": `after_s` after its process began; "operation": at the
            `count`-th file operation of saves from `step` on.
        always: at every start, not at the first alone.
    """

    act: str
    rank: int | None = None
    phase: str = "time"
    step: int = 0
    after_s: float = 0.0
    count: int = 0
    always: bool = False


def plant(fault: Fault | None, run_dir: Path, background: bool) -> None:
    """Called in the forked parent of a run; its ranks inherit what is done here."""
    from gptrain.assemble import trainer
    from gptrain.launch import local, rank
    from gptrain.lit.callbacks import checkpoints

    local.START_METHOD = "fork"
    if background:
        checkpoints.BACKGROUND_BYTES = 0
    run_rank, build_callbacks = rank.run_rank, trainer.build_callbacks

    @functools.wraps(run_rank)
    def watched(*args, **kwargs):
        note_pid(run_dir, f"rank-{this_process().rank}")
        if fault is not None and fault.rank in (None, this_process().rank):
            arm(fault, run_dir)
        return run_rank(*args, **kwargs)

    def witnessed(*args):
        return [make_witness(run_dir), *build_callbacks(*args)]

    rank.run_rank, trainer.build_callbacks = watched, witnessed


def note_pid(run_dir: Path, name: str) -> None:
    """Tells the campaign which process is what."""
    (run_dir / PIDS).mkdir(parents=True, exist_ok=True)
    (run_dir / PIDS / name).write_text(str(os.getpid()))


def make_witness(run_dir: Path):
    """A callback that writes down what each micro-step saw and gave."""
    from lightning.pytorch import Callback

    class Witness(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen = hashlib.sha256(batch[0].numpy().tobytes()).hexdigest()[:16]
            step = batch_idx // trainer.accumulate_grad_batches
            line = f"{batch_idx} {step} {seen} {float(module.step_losses[-1]).hex()}\n"
            name = WITNESS.format(rank=trainer.global_rank)
            with (run_dir / name).open("a") as file:
                file.write(line)

    return Witness()


def arm(fault: Fault, run_dir: Path) -> None:
    """Puts the fault in its place, in the rank that it is for."""
    acts.run_dir = run_dir
    act = once(getattr(acts, fault.act), fault, run_dir)
    if fault.phase == "time":
        timer = threading.Timer(fault.after_s, act)
        timer.daemon = True
        timer.start()
    elif fault.phase == "operation":
        at_operation(fault, act)
    else:
        at_phase(fault, act)


def once(act: Callable, fault: Fault, run_dir: Path) -> Callable:
    """The act, at most once in the life of the run folder."""

    def guarded(*args):
        if not fault.always:
            try:
                (run_dir / f"planted-{this_process().rank}").touch(exist_ok=False)
            except FileExistsError:
                return None
        return act(*args)

    return guarded


def at_phase(fault: Fault, act: Callable) -> None:
    """Runs the act when the rank enters the phase at or after the step."""
    import gptrain.assemble as build
    from gptrain.data import DummyTextDataset
    from gptrain.lit import LanguageModel
    from gptrain.lit.callbacks import Checkpoints, Guarded, StepLog

    places = {
        "setup": (build, "build_trainer"),
        "data": (DummyTextDataset, "__getitems__"),
        "forward": (LanguageModel, "loss"),
        "backward": (LanguageModel, "loss"),
        "clip": (LanguageModel, "configure_gradient_clipping"),
        "log": (StepLog, "on_train_batch_end"),
        "validation": (LanguageModel, "validation_step"),
        "save": (Checkpoints, "on_save_checkpoint"),
        "teardown": (Guarded, "on_train_end"),
    }
    owner, name = places[fault.phase]
    method, calls = getattr(owner, name), []

    @functools.wraps(method)
    def entered(*args, **kwargs):
        calls.append(None)
        trainer = next((t for a in args if (t := getattr(a, "_trainer", None))), None)
        trainer = next((a for a in args if hasattr(a, "fit_loop")), trainer)
        at = trainer.global_step if trainer is not None else len(calls)
        if at < fault.step and fault.phase != "setup":  # which comes once, before all steps
            return method(*args, **kwargs)
        if fault.phase == "backward":
            loss = method(*args, **kwargs)
            if loss.requires_grad:  # of a training step
                loss.register_hook(lambda gradient: act(gradient))
            return loss
        if fault.act == "poison":
            loss = method(*args, **kwargs)
            poisoned = act(loss)
            return loss if poisoned is None else poisoned
        act()
        return method(*args, **kwargs)

    setattr(owner, name, entered)


def at_operation(fault: Fault, act: Callable) -> None:
    """Runs the act before the count-th file operation of saves, from the first at `step` on.

    The operations of a save are those of the thread that writes it in the background, too.
    """
    from gptrain.lit.callbacks import Checkpoints

    begun = threading.Event()  # the step has come
    counted: list[None] = []
    saving: list[None] = []  # one entry per call that is under way

    def of_a_save(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(self, trainer, *args, **kwargs):
            if trainer.global_step < fault.step:
                return method(self, trainer, *args, **kwargs)
            begun.set()
            saving.append(None)
            try:
                return method(self, trainer, *args, **kwargs)
            finally:
                saving.pop()

        return call

    def breaking(operation: Callable) -> Callable:
        def call(*args):
            in_background = threading.current_thread() is not threading.main_thread()
            if saving or (in_background and begun.is_set()):
                counted.append(None)
                if len(counted) == fault.count:
                    act()
            return operation(*args)

        return call

    Checkpoints.save = of_a_save(Checkpoints.save)
    Checkpoints._finish = of_a_save(Checkpoints._finish)
    for name in fileops.OPERATIONS:
        setattr(fileops, name, breaking(getattr(fileops, name)))

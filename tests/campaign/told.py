"""Signals that ask a run to stop: saved, 75, and on it goes. Each function is one try."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence

from tests.campaign.expect import ends, goes_on_as_if_nothing
from tests.campaign.lab import EVERY, Lab
from tests.campaign.plant import Fault
from tests.campaign.truth import difference, redone

STRATEGIES = ("fsdp", "tensor_parallel", "pipeline", "fsdp_tensor_parallel", "ddp_pipeline")
STEP_PHASES = ("forward", "backward", "clip", "log", "validation", "save")


def stopped_often_alone(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """One process; accumulation, a validation every 3 steps, 0 and 2 workers by turns."""
    return in_pieces(
        lab,
        (("setup", 0), ("log", 3), ("validation", 6), ("forward", 8), ("validation", lab.n_steps)),
        "trainer.devices=1",
        "trainer.accumulate_grad_batches=3",
        "trainer.val_check_interval=3",
        "data.num_samples=41",
    )


def stopped_often(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """Two ranks; accumulation by the global batch, and an end of the data within the run."""
    places = (("log", 8), ("validation", 10), ("validation", lab.n_steps))
    return in_pieces(lab, places, "data.global_batch_size=8", "data.num_samples=75")


def stopped_under_each_strategy(lab: Lab, reference: dict, draw: random.Random) -> list[str | None]:
    """Two or four ranks, sharded checkpoints in the background, dropout on."""
    results = []
    for strategy in STRATEGIES:
        n_ranks = 4 if strategy in ("fsdp_tensor_parallel", "ddp_pipeline") else 2
        options = (f"strategy={strategy}", f"trainer.devices={n_ranks}")
        options = (*options, "data.batch_size=4", "data.num_samples=200")
        reference, run_dir = lab.reference(*options), lab.new(strategy)
        found = None
        for phase, step in (("log", 8), ("log", 13)):
            fault = Fault("term", 1, phase, step, always=True)
            again = ("ckpt_path=last", *options)
            attempt = lab.start(run_dir, *again, fault=fault, background=True)
            found = found or ends(attempt, 75, "preempted")
        found = found or ends(lab.resume(run_dir, *options), 0) or difference(run_dir, reference)
        results.append(found and f"{strategy}: {found}")
    return results


def in_pieces(lab: Lab, places: Sequence[tuple[str, int]], *options: str) -> str | None:
    """Stopped in each phase at each step of these, and resumed with other workers."""
    reference = lab.reference(*options, "data.num_workers=0")
    run_dir = lab.new("pieces")
    for turn, (phase, step) in enumerate(places):
        fault = Fault("term", 0, phase, step, always=True)
        workers = f"data.num_workers={2 * (turn % 2)}"
        attempt = lab.start(run_dir, "ckpt_path=last", workers, *options, fault=fault)
        if code := ends(attempt, 75, "preempted"):
            return f"{phase} {step}: {code}"
    found = ends(lab.resume(run_dir, *options), 0) or difference(run_dir, reference)
    return found or (None if redone(run_dir, 0) == 0 else "steps were done again")


def told_alone(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """One rank gets a signal in some phase; all save the same step and leave."""
    phase = draw.choice((*STEP_PHASES, "setup", "time"))
    act = draw.choice(("term", "warn_by_usr1", "interrupt"))
    after_s = draw.uniform(0, 0.3) if phase == "time" else 0.0
    fault = Fault(act, draw.randrange(2), phase, draw.randrange(1, lab.n_steps - 1), after_s)
    return saves_and_leaves(lab, reference, fault)


def told_together(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """The whole process group gets it, two data workers in each rank included."""
    act = draw.choice(("term_group", "term_launcher"))
    fault = Fault(act, draw.randrange(2), draw.choice(STEP_PHASES[:4]), draw.randrange(1, 17))
    return saves_and_leaves(lab, reference, fault, "data.num_workers=2")


def saves_and_leaves(lab: Lab, reference: dict, fault: Fault, *options: str) -> str | None:
    attempt = lab.start(lab.new(f"{fault.act}-{fault.phase}"), *options, fault=fault)
    code = attempt.wait()
    if code == 0:  # told when all was done
        return difference(attempt.run_dir, reference)
    found = ends(attempt, 75, "preempted", None)
    return found or goes_on_as_if_nothing(lab, attempt.run_dir, reference, 0)


def interrupted_twice(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    fault = Fault("dawdle", 0, "forward", 6)
    attempt = lab.start(lab.new("interrupts"), fault=fault)
    while not (attempt.run_dir / "planted-0").exists():
        time.sleep(0.02)
    os.kill(attempt.pid, signal.SIGINT)
    time.sleep(0.6)
    os.kill(attempt.pid, signal.SIGINT)
    found = ends(attempt, 130)
    return found or goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)

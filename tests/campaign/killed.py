"""SIGKILL of whatever a run consists of, at any time. Each function is one try."""

from __future__ import annotations

import random
from pathlib import Path

from tests.campaign.expect import ends, goes_on_as_if_nothing
from tests.campaign.lab import EVERY, Lab
from tests.campaign.plant import Fault
from tests.campaign.truth import difference, losses, redone


def killed_rank_restarts(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """The launcher starts all ranks again by itself."""
    fault = Fault("kill", rank=1, after_s=draw.uniform(0, lab.run_s))
    attempt = lab.start(lab.new("killed-1"), "launcher.max_restarts=1", fault=fault)
    if found := ends(attempt, 0) or difference(attempt.run_dir, reference):
        return found
    again = redone(attempt.run_dir, 1)
    return f"{again} steps were done again" if again > EVERY else None


def killed_rank_0(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    fault = Fault("kill", rank=0, after_s=draw.uniform(0, lab.run_s))
    attempt = lab.start(lab.new("killed-0"), fault=fault)
    if attempt.wait() == 0:  # it was done before
        return difference(attempt.run_dir, reference)
    found = ends(attempt, 70, "killed", 0)
    return found or goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def killed_group(
    lab: Lab, reference: dict, draw: random.Random, background: bool = False
) -> str | None:
    fault = Fault("kill_group", rank=0, after_s=draw.uniform(0, lab.run_s))
    attempt = lab.start(lab.new("killed-group"), fault=fault, background=background)
    attempt.wait()
    if left := attempt.orphans():
        return left
    redo = 2 * EVERY if background else EVERY
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, redo)


def killed_while_writing(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """The same where checkpoints are written in the background."""
    return killed_group(lab, reference, draw, background=True)


def killed_launcher(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    fault = Fault("kill_launcher", rank=draw.randrange(2), after_s=draw.uniform(0, lab.run_s))
    attempt = lab.start(lab.new("killed-launcher"), fault=fault)
    attempt.wait()
    if left := attempt.orphans():
        return left
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def storm(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """One fault after another until the run is done; at least 20 of them before its last steps."""
    options = ("trainer.max_steps=400", "trainer.val_check_interval=100")
    reference, run_dir, n_faults = lab.reference(*options), lab.new("storm"), 0
    while n_faults < 200:
        act, rank = draw.choice(("kill", "kill_group", "kill_launcher", "term")), draw.randrange(2)
        fault = Fault(act, rank=rank, after_s=draw.uniform(0, 0.8), always=True)
        again = lab.start(run_dir, "ckpt_path=last", *options, fault=fault, background=True)
        if again.wait() == 0:
            break
        n_faults += 1
    if n_faults in range(20, 200):
        return difference(run_dir, reference)
    return f"done, or not, after {n_faults} faults"


def worker_killed(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    fault = Fault("kill_worker", draw.randrange(2), "forward", draw.randrange(1, lab.n_steps - 1))
    attempt = lab.start(lab.new("worker"), fault=fault)
    if found := ends(attempt, 70, "error", fault.rank):
        return found
    if "DataLoader worker" not in attempt.status()["message"]:
        return f"the worker is not named: {attempt.status()['message']}"
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def killed_at_the_edge(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """In the last validation, at the last step, after it, and once all is done."""
    phase, step = draw.choice(
        (("validation", 10), ("validation", lab.n_steps), ("log", lab.n_steps), ("teardown", 0))
    )
    fault = Fault("kill", draw.randrange(2), phase, step)
    attempt = lab.start(lab.new(f"edge-{phase}-{step}"), fault=fault)
    if found := ends(attempt, 70, "killed", fault.rank):
        return found
    found = goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)
    return found or done_stays_done(lab, attempt.run_dir, reference)


def done_stays_done(lab: Lab, run_dir: Path, reference: dict) -> str | None:
    """A run that is done and started again does nothing more, and keeps its result."""
    result, before = (run_dir / "result.json").read_text(), losses(run_dir, 0)
    attempt = lab.resume(run_dir)
    if code := attempt.wait():
        return f"a done run ended with {code}: {attempt.text()[-500:]}"
    if losses(run_dir, 0) != before or redone(run_dir, 0) > EVERY:
        return "a done run trained on"
    if '"val/loss"' not in (run_dir / "result.json").read_text():
        return f"the result was {result}"
    return difference(run_dir, reference)

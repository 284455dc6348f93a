"""Exceptions, hangs and bad numbers on one rank. Each function is one try."""

from __future__ import annotations

import random

from tests.campaign.expect import ends, goes_on_as_if_nothing
from tests.campaign.lab import EVERY, Lab
from tests.campaign.plant import Fault
from tests.campaign.told import STEP_PHASES
from tests.campaign.truth import difference


def fails_alone(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """An exception on one rank, in some phase."""
    phase = draw.choice((*STEP_PHASES, "setup", "data", "teardown"))
    fault = Fault("fail", draw.randrange(2), phase, draw.randrange(lab.n_steps - 1))
    attempt = lab.start(lab.new(f"fails-{phase}"), fault=fault)
    if found := ends(attempt, 70, "error", fault.rank):
        return found
    if phase == "data" and "of whose samples" not in attempt.status()["message"]:
        return f"the samples are not named: {attempt.status()['message']}"
    text = attempt.text()
    first = text[text.index("Traceback") :]
    if text.count("Planted: on rank") - text.count("error: Planted") > 2 or "Planted" not in first:
        return f"the cause is not told once and first: {text[-2000:]}"
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def fails_for_ever(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """The same fault at every start: given up after three that got no further."""
    fault = Fault("fail", 1, "forward", 7, always=True)
    attempt = lab.start(lab.new("loop"), "launcher.max_restarts=10", fault=fault)
    if found := ends(attempt, 70, "error", 1):
        return found
    starts = attempt.text().count("Traceback")
    return None if starts == 4 else f"{starts} starts: the first got to step 5, three no further"


def stopped_for_ever(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    return hangs(lab, reference, Fault("stop", 1, "forward", draw.randrange(2, 18)))


def lock_held(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """A rank that computes in C with the interpreter's lock: none of its own threads can run."""
    return hangs(lab, reference, Fault("hold_interpreter", 1, "forward", draw.randrange(2, 18)))


def hangs(lab: Lab, reference: dict, fault: Fault) -> str | None:
    attempt = lab.start(lab.new(fault.act), "launcher.timeout_s=4", fault=fault)
    if found := ends(attempt, 76, "hang", 1):
        return found
    text = attempt.text()
    if "most recent call first" not in text:
        return "no stacks of the live rank"
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def stopped_for_a_while(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    fault = Fault("stop_for_a_while", 1, "forward", draw.randrange(2, 18))
    attempt = lab.start(lab.new("paused"), "launcher.timeout_s=8", fault=fault)
    return ends(attempt, 0) or difference(attempt.run_dir, reference)


def calls_alone(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """A collective that one rank calls and the others do not: an end in time, no wrong numbers.

    Where its size differs from what the others call, gloo aborts the process; where they wait, the
    watchdog ends them.
    """
    phase = draw.choice(("forward", "backward", "clip", "log"))
    fault = Fault("call_alone", draw.randrange(2), phase, draw.randrange(2, 18))
    attempt = lab.start(lab.new(f"alone-{phase}"), "launcher.timeout_s=4", fault=fault)
    if attempt.wait(25) not in (70, 76):
        return f"exit {attempt.wait()}: {attempt.text()[-500:]}"
    if left := attempt.orphans():
        return left
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def lags_behind(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """A rank that takes 0.3 s more for every step is named, and the run is the same."""
    rank, options = draw.randrange(2), ("trainer.max_steps=20",)
    reference = lab.reference(*options)
    fault = Fault("lag", rank, draw.choice(("forward", "data")), 4, always=True)
    attempt = lab.start(lab.new("lags"), *options, "data.num_workers=0", fault=fault)
    if found := ends(attempt, 0) or difference(attempt.run_dir, reference):
        return found
    told = f"rank {rank} keeps the others waiting"
    return (
        None
        if attempt.text().count("keeps the others") == 1 and told in attempt.text()
        else (f"it is not told, or not of rank {rank}: {attempt.text()}")
    )


def lags_not(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    attempt = lab.start(lab.new("lags-not"))
    found = ends(attempt, 0) or difference(attempt.run_dir, reference)
    return found or ("a false alarm" if "keeps the others" in attempt.text() else None)


def not_a_number(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    rank, step = draw.choice((0, 1, None)), draw.randrange(1, lab.n_steps)
    fault = Fault("poison", rank, draw.choice(("forward", "backward")), step)
    attempt = lab.start(lab.new("nan"), fault=fault)
    if found := ends(attempt, 79, "nonfinite"):
        return found
    message = attempt.status()["message"]
    if f"step {step}" not in message or "samples: " not in message:
        return f"step and samples are not named: {message}"
    if fault.phase == "forward" and rank is not None and f"rank {rank}" not in message:
        return f"rank {rank} is not named: {message}"
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def skipped(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """on_nonfinite=skip: the run goes on without that step."""
    fault = Fault("poison", 1, "forward", draw.randrange(1, lab.n_steps))
    attempt = lab.start(lab.new("skip"), "on_nonfinite=skip", fault=fault)
    if found := ends(attempt, 0):
        return found
    return None if "left out" in attempt.text() else "it is not told"

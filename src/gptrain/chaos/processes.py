"""Faults of processes. Each function is one try: None where all held, else what did not."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from gptrain.chaos.lab import EVERY, N_STEPS, Attempt, Lab
from gptrain.chaos.plant import WITNESS, Fault
from gptrain.chaos.truth import difference, losses, redone

RUN_S = 2.0  # about what a run takes from the start of a rank to its end; where faults are thrown
LEAVE_S = 10.0  # for the others, once a rank has failed
STEP_PHASES = ("forward", "backward", "clip", "log", "validation", "save")


def goes_on_as_if_nothing(lab: Lab, run_dir: Path, reference: dict, redo: int) -> str | None:
    """Resumes until done; the run must equal the reference, with few steps done again."""
    attempt = lab.resume(run_dir)
    if code := attempt.wait():
        return f"resumed, it ended with {code}: {attempt.text()[-500:]}"
    if found := difference(run_dir, reference):
        return found
    again = redone(run_dir, 0)
    return f"{again} steps were done again" if again > redo else None


def ends(
    attempt: Attempt, code: int, cause: str | None = None, rank: int | None = None
) -> str | None:
    """Whether a run ended as it should, in time, with nothing left behind."""
    ended = attempt.wait()
    if ended != code:
        return f"exit {ended} instead of {code}: {attempt.text()[-500:]}"
    if left := attempt.orphans():
        return f"{len(left)} processes left"
    status = attempt.status()
    if cause is not None and status.get("cause") != cause:
        return f"status.json says {status.get('cause')}, not {cause}"
    if rank is not None and status.get("rank") != rank:
        return f"status.json names rank {status.get('rank')}, not {rank}"
    planted = attempt.run_dir / f"planted-{rank}"
    if planted.exists() and time.time() - planted.stat().st_mtime > LEAVE_S:
        return f"it took {time.time() - planted.stat().st_mtime:.1f} s to end"
    return None


def stopped_often_alone(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """One process; accumulation, a validation every 3 steps, 0 and 2 workers by turns."""
    return in_pieces(
        lab,
        (("setup", 0), ("log", 3), ("validation", 6), ("forward", 8), ("validation", N_STEPS)),
        "trainer.devices=1",
        "trainer.accumulate_grad_batches=3",
        "trainer.val_check_interval=3",
        "data.num_samples=41",
    )


def stopped_often(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """Two ranks; accumulation by the global batch, and an end of the data within the run."""
    places = (("log", 8), ("validation", 10), ("validation", N_STEPS))
    return in_pieces(lab, places, "data.global_batch_size=8", "data.num_samples=75")


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


def killed_rank_restarts(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """The launcher starts all ranks again by itself."""
    fault = Fault("kill", rank=1, after_s=draw.uniform(0, RUN_S))
    attempt = lab.start(lab.new("killed-1"), "launcher.max_restarts=1", fault=fault)
    if found := ends(attempt, 0) or difference(attempt.run_dir, reference):
        return found
    again = redone(attempt.run_dir, 1)
    return f"{again} steps were done again" if again > EVERY else None


def killed_rank_0(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    fault = Fault("kill", rank=0, after_s=draw.uniform(0, RUN_S))
    attempt = lab.start(lab.new("killed-0"), fault=fault)
    if attempt.wait() == 0:  # it was done before
        return difference(attempt.run_dir, reference)
    found = ends(attempt, 70, "killed", 0)
    return found or goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def killed_group(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    fault = Fault("kill_group", rank=0, after_s=draw.uniform(0, RUN_S))
    attempt = lab.start(lab.new("killed-group"), fault=fault)
    attempt.wait()
    if left := attempt.orphans():
        return f"{len(left)} processes left"
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def killed_launcher(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    fault = Fault("kill_launcher", rank=draw.randrange(2), after_s=draw.uniform(0, RUN_S))
    attempt = lab.start(lab.new("killed-launcher"), fault=fault)
    attempt.wait()
    if left := attempt.orphans():
        return f"{len(left)} orphans"
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


def storm(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """One fault after another until the run is done."""
    run_dir, n_faults = lab.new("storm"), 0
    while n_faults < 100:
        act, rank = draw.choice(("kill", "kill_group", "kill_launcher", "term")), draw.randrange(2)
        fault = Fault(act, rank=rank, after_s=draw.uniform(0, 0.8), always=True)
        if lab.start(run_dir, "ckpt_path=last", fault=fault).wait() == 0:
            break
        n_faults += 1
    return difference(run_dir, reference) or (None if n_faults < 100 else "it does not get on")


def told_alone(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """One rank gets a signal in some phase; all save the same step and leave."""
    phase = draw.choice((*STEP_PHASES, "setup", "time"))
    act = draw.choice(("term", "warn_by_usr1", "interrupt"))
    after_s = draw.uniform(0, 0.3) if phase == "time" else 0.0
    fault = Fault(act, draw.randrange(2), phase, draw.randrange(1, N_STEPS - 1), after_s)
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


def fails_alone(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """An exception on one rank, in some phase."""
    phase = draw.choice((*STEP_PHASES, "setup", "data", "teardown"))
    fault = Fault("fail", draw.randrange(2), phase, draw.randrange(N_STEPS - 1))
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


def worker_killed(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    fault = Fault("kill_worker", draw.randrange(2), "forward", draw.randrange(1, N_STEPS - 1))
    attempt = lab.start(lab.new("worker"), fault=fault)
    if found := ends(attempt, 70, "error", fault.rank):
        return found
    if "DataLoader worker" not in attempt.status()["message"]:
        return f"the worker is not named: {attempt.status()['message']}"
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, EVERY)


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


def not_a_number(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    rank, step = draw.choice((0, 1, None)), draw.randrange(1, N_STEPS)
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
    fault = Fault("poison", 1, "forward", draw.randrange(1, N_STEPS))
    attempt = lab.start(lab.new("skip"), "on_nonfinite=skip", fault=fault)
    if found := ends(attempt, 0):
        return found
    return None if "left out" in attempt.text() else "it is not told"


def two_at_once(lab: Lab, reference: dict, draw: random.Random, n: int = 4) -> str | None:
    """n starts in one folder: one runs, the others are refused and told by whom."""
    run_dir = lab.new("crowd")
    endless = ("ckpt_path=last", "trainer.max_steps=1000000")  # until all others have asked
    attempts = [lab.start(run_dir, *endless) for _ in range(n)]
    give_up_s = time.monotonic() + 200
    while len(left := [a for a in attempts if not a.has_ended()]) > 1:
        if time.monotonic() > give_up_s:
            return f"{len(left)} of them run"
        time.sleep(0.02)
    if not left:
        return f"exit codes {[attempt.code for attempt in attempts]}"
    (holder,), refused = left, [a for a in attempts if a is not left[0]]
    while not (run_dir / WITNESS.format(rank=0)).exists() and not holder.has_ended():
        time.sleep(0.02)
    os.kill(holder.pid, signal.SIGTERM)
    codes = [a.wait() for a in refused]
    if set(codes) != {73} or any(f"process {holder.pid} on " not in a.text() for a in refused):
        return f"exit codes {codes}; or the holder is not named: {refused[0].text()[-300:]}"
    found = ends(holder, 75, "preempted")
    return found or ("two runs have written" if redone(run_dir, 0) else None)


def crowd(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    return two_at_once(lab, reference, draw, n=50)


def neighbours(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """Two runs that start at the same instant never meet."""
    attempts = [lab.start(lab.new("neighbour")) for _ in range(2)]
    return next((found for a in attempts if (found := ends(a, 0))), None) or next(
        (found for a in attempts if (found := difference(a.run_dir, reference))), None
    )


def fails_for_ever(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """The same fault at every start: given up after three that got no further."""
    fault = Fault("fail", 1, "forward", 7, always=True)
    attempt = lab.start(lab.new("loop"), "launcher.max_restarts=10", fault=fault)
    if found := ends(attempt, 70, "error", 1):
        return found
    starts = attempt.text().count("Traceback")
    return None if starts == 4 else f"{starts} starts: the first got to step 5, three no further"


def other_ranks(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """Saved on two ranks, resumed on another number of them at the same global batch."""
    options = ("data.global_batch_size=8", "model.dropout=0.0")
    plain = lab.start(lab.new("plain"), *options)
    other = lab.start(lab.new("other"), *options, fault=Fault("term", 1, "forward", 9))
    if plain.wait() or other.wait() != 75:
        return f"they ended with {plain.text()[-300:]}, {other.text()[-300:]}"
    n_ranks = draw.choice((1, 4))
    resumed = lab.resume(other.run_dir, *options, f"trainer.devices={n_ranks}")
    if code := resumed.wait():
        return f"resumed on {n_ranks}, it ended with {code}: {resumed.text()[-500:]}"
    if "ranks saved" not in resumed.text():
        return "the change is not announced"
    return same_steps(plain.run_dir, other.run_dir, n_ranks)


def same_steps(one: Path, other: Path, n_ranks: int) -> str | None:
    """The same batches in every step; losses as near as another order of summation allows."""
    # Sums in fp32 of another order: 1e-7 each, times the growth over the steps of a tiny run.
    before = {line.split()[0]: float.fromhex(line.split()[1]) for line in batches(one, 2)}
    after = {line.split()[0]: float.fromhex(line.split()[1]) for line in batches(other, n_ranks)}
    if before.keys() != after.keys():
        return "other batches"
    worst = max(abs(before[batch] - after[batch]) for batch in before)
    return None if worst < 1e-4 else f"losses differ by {worst}"


def batches(run_dir: Path, n_ranks: int) -> list[str]:
    """`batch loss` of every micro-step of every rank that ever was."""
    found = sorted(run_dir.glob("witness-*.txt"))
    return [line.partition(" ")[2] for path in found for line in path.read_text().splitlines()]


def changed(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """Resumed as another run: refused by name before a rank starts, unless it is allowed."""
    key, value = draw.choice(
        (
            ("model.d_model", "64"),
            ("model.dropout", "0.2"),
            ("seed", "7"),
            ("optimizer.lr", "1e-3"),
            ("data.num_samples", "61"),
            ("data.global_batch_size", "8"),
            ("scheduler.min_factor", "0.5"),
        )
    )
    attempt = lab.start(lab.new("changed"), fault=Fault("term", 1, "forward", 7))
    attempt.wait()
    (attempt.run_dir / "pids" / "rank-0").unlink()
    again = lab.resume(attempt.run_dir, f"{key}={value}")
    code, text = again.wait(), again.text()
    if code != 2 or f"error: {key}=" not in text:
        return f"exit {code}: {text[-300:]}"
    if text.count("error:") != 1:
        return f"more than one line for one key: {text}"
    if (attempt.run_dir / "pids" / "rank-0").exists():
        return "a rank was started"
    return goes_on_as_if_nothing(lab, attempt.run_dir, reference, 0)


def killed_at_the_edge(lab: Lab, reference: dict, draw: random.Random) -> str | None:
    """In the last validation, at the last step, after it, and once all is done."""
    phase, step = draw.choice(
        (("validation", 10), ("validation", N_STEPS), ("log", N_STEPS), ("teardown", 0))
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

"""Several runs at once, and a run that goes on as another. Each function is one try."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from tests.campaign.expect import ends, goes_on_as_if_nothing
from tests.campaign.lab import Lab
from tests.campaign.plant import WITNESS, Fault
from tests.campaign.truth import difference, redone


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
    return same_steps(plain.run_dir, other.run_dir)


def same_steps(one: Path, other: Path) -> str | None:
    """The same batches in every step; losses as near as another order of summation allows."""
    # Sums in fp32 of another order: 1e-7 each, times the growth over the steps of a tiny run.
    before, after = batches(one), batches(other)
    if before.keys() != after.keys():
        return "other batches"
    worst = max(abs(before[batch] - after[batch]) for batch in before)
    return None if worst < 1e-4 else f"losses differ by {worst}"


def batches(run_dir: Path) -> dict[tuple[str, str], float]:
    """(step, batch) -> loss, of every micro-step of every rank that ever was."""
    found = {}
    for path in run_dir.glob(WITNESS.format(rank="*")):
        for line in path.read_text().splitlines():
            _, step, batch, loss = line.split()
            found[step, batch] = float.fromhex(loss)
    return found


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

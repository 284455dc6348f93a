"""What is done to a checkpoint between two starts, and tries of another shape than most."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

from gptrain.resilience.manifest import DamagedCheckpoint
from gptrain.resilience.store import CheckpointStore
from tests.campaign.lab import Attempt, Lab
from tests.campaign.trial import Scenario, fault_words, strike
from tests.campaign.truth import difference, repeated

YEAR_2099_S = 4_070_908_800
CHANGES = ("model.d_model=64", "model.vocab_size=65", "seed=7", "optimizer.lr=1e-3",
           "data.num_samples=61", "data.global_batch_size=16", "optimizer=muon")  # fmt: skip


def flip(folder: Path, draw: random.Random) -> None:
    """One bit of any file."""
    path = draw.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(folder: Path, draw: random.Random) -> None:
    """Any file ends anywhere, also after 0 bytes or 1."""
    path = draw.choice(sorted(folder.iterdir()))
    os.truncate(path, draw.choice((0, 1, draw.randrange(path.stat().st_size))))


def mix_up(folder: Path, draw: random.Random) -> None:
    """A file is gone, is that of another step, or is another one."""
    one, two = draw.sample(sorted(folder.iterdir()), 2)
    older = sorted(folder.parent.glob("step-????????"))[-2] / "manifest.json"
    one.unlink()
    if draw.random() < 0.7:
        shutil.copy(two if one.name != older.name else older, one)


def flip_all(folder: Path, draw: random.Random) -> None:
    for path in folder.parent.glob("step-*"):
        flip(path, draw)


def age(folder: Path, draw: random.Random) -> None:
    """It is damaged, and all files are of the year 2099."""
    flip(folder, draw)
    for path in folder.parent.rglob("*"):
        os.utime(path, (YEAR_2099_S, YEAR_2099_S))


def reuse_pid(folder: Path, draw: random.Random) -> None:
    """The lock of a dead run names a process that lives."""
    lock = folder.parents[1] / ".lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"pid": os.getpid()}))


def detected(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """A hundred damages of one checkpoint, each seen by its verification."""
    folder = max((lab.cut_back(lab.n_steps, *row.reference) / "checkpoints").glob("step-*"))
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    for number in range(100):
        harm = draw.choice((flip, truncate, mix_up))
        harm(folder, draw)
        try:
            CheckpointStore(folder.parent).verify(folder)
            return f"{number}: {harm.__name__} was not seen"
        except DamagedCheckpoint:
            for path, content in kept.items():
                path.write_bytes(content)
    return None


def storm(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """One fault after another until the run is done: at least 20."""
    _, reference = lab.reference(*row.reference)
    run_dir, n_faults, left = lab.new("storm"), 0, []
    while n_faults < 200 and not left:
        attempt, target = lab.resume(run_dir, *row.reference), draw.choice(("rank", "group"))
        after_s = draw.uniform(0.3, 1.0) * lab.run_s
        strike(attempt, draw.choice(row.acts), target, draw.randrange(2), after_s)
        if attempt.wait() == 0:
            break
        n_faults, left = n_faults + 1, attempt.orphans()
    few = f"done, or not, after {n_faults} faults; {left}" if left or n_faults < 20 else None
    return few or difference(run_dir, reference)


def crowd(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """Three starts in one folder: one runs, the others are refused and name it."""
    run_dir, give_up_s = lab.new("crowd"), time.monotonic() + 60
    attempts = [lab.resume(run_dir, "trainer.max_steps=1000000") for _ in range(3)]

    def running() -> list[Attempt]:
        return [one for one in attempts if one.code is None]

    while len(running()) > 1 or not (run_dir / "witness-0.txt").exists():
        if time.monotonic() > give_up_s or not running():
            return f"exit codes {[one.code for one in attempts]}"
        time.sleep(0.02)
    (holder,) = running()
    os.kill(holder.process.pid, signal.SIGTERM)
    codes = [(one.wait(), f"process {holder.process.pid} on " in one.text()) for one in attempts]
    right = sorted(codes) == [(73, True), (73, True), (75, False)] and not repeated(run_dir)
    return None if right else f"{codes}, {repeated(run_dir)} steps twice: {attempts[0].text()}"


def other_ranks(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """Saved on two ranks, resumed on one or four at the same global batch."""
    run_dir, n_ranks = lab.cut_back(10, *row.reference), draw.choice((1, 4))
    words = (*row.reference, f"trainer.devices={n_ranks}", "data.batch_size=2")
    resumed = lab.resume(run_dir, *words)
    if resumed.wait() or f"resumed on {n_ranks} ranks" not in resumed.text():
        return f"exit {resumed.code}, or it is not said: {resumed.text()[-1500:]}"
    pairs = zip(losses(run_dir), losses(lab.reference(*row.reference)[0]), strict=True)
    worst = max(abs(one - other) for one, other in pairs)
    # fp32 sums in another order, a few 1e-7 a step; other samples would show at 1e-2.
    return None if worst < 1e-4 else f"losses differ by {worst}"


def losses(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def changed(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """Resumed as another run: refused by name, before a rank starts."""
    run_dir, change = lab.cut_back(10), draw.choice(CHANGES)
    attempt = lab.resume(run_dir, change)
    right = attempt.wait() == 2 and f"error: {change.partition('=')[0]}" in attempt.text()
    trained = repeated(run_dir) or (run_dir / "status.json").exists()
    return None if right and not trained else f"{change}: {attempt.code}: {attempt.text()}"


def sweep(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """Of a sweep of three jobs the second is killed: the others are done, the table says it."""
    keys = {"act": "SIGKILL", "phase": "log", "rank": 1, "step": "999,7,999", "target": "rank"}
    attempt = lab.start(lab.new("sweep"), "-m", *fault_words(**keys, operation=0, always=False))
    if attempt.wait(120) != 70 or not re.search(r"1  failed \(70\)", attempt.text()):
        return f"exit {attempt.code}: {attempt.text()[-1500:]}"
    _, reference = lab.reference()
    return next((d for n in "02" if (d := difference(attempt.run_dir / n, reference))), None)

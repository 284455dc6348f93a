"""One try of a scenario: None where all that was promised held, else what did not."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from tests.campaign.faults import HOOKS, send
from tests.campaign.lab import EVERY, Attempt, Lab
from tests.campaign.truth import difference, micro_steps, repeated

YEAR_2099_S = 4_070_908_800
Try = Callable[["Scenario", Lab, random.Random], "str | None"]


@dataclass(frozen=True)
class Scenario:
    """A row of the table. Of a tuple of acts, phases or codes one is drawn, or any is right.

    Attributes:
        fault: its number in the project's list of faults.   what: in a few words.
        act, phase, rank, step, target, operation, always: of `faults.Fault`. act "": none, but a
            copy of the reference run, cut back to an earlier checkpoint; rank, step None: drawn;
            step -1: the last; operation (1, 9): drawn; phase "time": a signal at a random moment.
        code: exit code of the run; 0: it must equal the reference.
        cause: of status.json.   blames: status.json names the rank.
        says: a pattern in the output; {rank} and {step} are those of the fault.
        within_s: from the fault to the end.
        harm: done to the run folder before the resume.
        again: exit code of the resume; None: there is none.   redo: steps done twice at most.
        twice: the run that is done is started once more, and does nothing.
        reference: words of all starts, and of the reference.   words: of all starts.
        first: of the first start alone.   env: of the first start.
        quick, full: tries in a quick and in a full campaign.
        one_try: what a try is.
    """

    fault: str
    what: str
    act: str | tuple[str, ...] = ""
    phase: str | tuple[str, ...] = "time"
    rank: int | None = None
    step: int | None = None
    target: str = "rank"
    operation: tuple[int, int] = (0, 0)
    always: bool = False
    code: int | tuple[int, ...] = 70
    cause: str | None = None
    blames: bool = False
    says: str = ""
    within_s: float = 12.0
    harm: Callable[[Path, random.Random], None] | None = None
    again: int | None = 0
    redo: int = EVERY
    twice: bool = False
    reference: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    quick: int = 0
    full: int = 10
    one_try: Try | None = None

    def attempt(self, lab: Lab, draw: random.Random) -> str | None:
        """One try; an exception of the campaign itself is a failure, too."""
        try:
            return (self.one_try or try_fault)(self, lab, draw)
        except (OSError, ValueError, LookupError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def try_fault(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """The fault, the end, the harm, the resume, and the comparison with the reference."""
    _, reference = lab.reference(*row.reference)
    if row.act:
        attempt, found = befall(row, lab, draw)
        if found or attempt.code == 0:
            return found or difference(attempt.run_dir, reference)
        run_dir = attempt.run_dir
    else:
        run_dir = lab.cut_back(lab.n_steps - EVERY, *row.reference)
    if row.harm is not None:
        row.harm(run_dir, draw)
    if row.again is None:
        return None
    before = repeated(run_dir)
    attempt = lab.resume(run_dir, *row.reference, *row.words)
    if attempt.wait() != row.again:
        return f"resumed, it ended with {attempt.code}: {attempt.text()[-1500:]}"
    if not row.act and not re.search(row.says, attempt.text()):
        return f"{row.says} is not said: {attempt.text()}"
    if row.again:
        return None
    if found := difference(run_dir, reference):
        return found
    if row.act and repeated(run_dir) - before > row.redo:
        return f"{repeated(run_dir) - before} steps were done again"
    return stays_done(row, lab, run_dir) if row.twice else None


def befall(row: Scenario, lab: Lab, draw: random.Random) -> tuple[Attempt, str | None]:
    """A run with the fault, and whether it ended as it should."""
    act, phase = (
        draw.choice(one) if isinstance(one, tuple) else one for one in (row.act, row.phase)
    )
    rank = draw.randrange(2) if row.rank is None else row.rank
    step = draw.randrange(1, lab.n_steps - 4) if row.step is None else row.step
    step = lab.n_steps if step == -1 else step
    words = (*row.reference, *row.words, *row.first)
    if phase in HOOKS:
        keys = {"_target_": "tests.campaign.faults.Fault", "act": act, "phase": phase}
        keys |= {"rank": rank, "step": step, "target": row.target, "always": row.always}
        keys["operation"] = draw.randint(*row.operation)
        words += tuple(f"+callbacks.fault.{key}={value}" for key, value in keys.items())
    attempt = lab.start(lab.new(f"{row.fault}-{phase}"), *words, env=row.env)
    struck_s = strike(row, attempt, act, rank, draw.uniform(0, lab.run_s), phase)
    code, text = attempt.wait(), attempt.text()
    markers = [path.stat().st_mtime for path in attempt.run_dir.glob("planted-*")]
    took_s = time.time() - max(markers, default=struck_s)
    codes = row.code if isinstance(row.code, tuple) else (row.code,)
    status = attempt.status()
    if code == 0 and phase == "time":  # it was done before
        return attempt, None
    found = None
    if code not in codes:
        found = f"exit {code} instead of {codes}: {text[-1500:]}"
    elif left := attempt.orphans():
        found = f"processes are left: {left}"
    elif code and row.cause and status.get("cause") != row.cause:
        found = f"status.json says {status.get('cause')}: {status.get('message')}"
    elif code and row.blames and status.get("rank") != rank:
        found = f"status.json names rank {status.get('rank')}: {status.get('message')}"
    elif not re.search(row.says.format(rank=rank, step=step), text):
        found = f"{row.says.format(rank=rank, step=step)} is not said: {text}"
    elif code and took_s > row.within_s:
        found = f"it took {took_s:.1f} s to end"
    elif row.cause == "disk" and list(attempt.run_dir.glob("checkpoints/.draft*")):
        found = "half a save is left"
    return attempt, found and f"{act} of rank {rank} in {phase} at step {step}: {found}"


def strike(
    row: Scenario, attempt: Attempt, act: str, rank: int, after_s: float, phase: str
) -> float:
    """Sends the signal of phase "time"; when it was."""
    if phase == "time":
        time.sleep(after_s)
        while attempt.code is None:
            ranks = attempt.ranks()
            with suppress(ProcessLookupError):
                if row.target != "rank" or len(ranks) > rank:
                    pid = ranks[rank] if row.target == "rank" else 0
                    send(Signals[act], row.target, pid, attempt.process.pid)
                    break
            time.sleep(0.01)
    return time.time()


def stays_done(row: Scenario, lab: Lab, run_dir: Path) -> str | None:
    """A run that is done and started again does nothing more, and keeps its result."""
    before = micro_steps(run_dir / "witness-0.txt"), repeated(run_dir)
    attempt = lab.resume(run_dir, *row.reference)
    if attempt.wait():
        return f"a done run ended with {attempt.code}: {attempt.text()[-1500:]}"
    if (micro_steps(run_dir / "witness-0.txt"), repeated(run_dir)) != before:
        return "a done run trained on"
    return difference(run_dir, lab.reference(*row.reference)[1])


# What is done to a run folder between an end and a resume


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-????????"))


def flip(folder: Path, draw: random.Random) -> None:
    """One bit of any file."""
    path = draw.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    place = draw.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def truncate(folder: Path, draw: random.Random) -> None:
    """Any file ends anywhere, also after 0 bytes or 1."""
    path = draw.choice(sorted(folder.iterdir()))
    os.truncate(path, draw.choice((0, 1, draw.randrange(path.stat().st_size))))


def mix_up(folder: Path, draw: random.Random) -> None:
    """A file is gone, comes from another step, or two have changed places."""
    one, two = draw.sample(sorted(path for path in folder.iterdir()), 2)
    how = draw.randrange(3)
    if how == 0:
        one.unlink()
    elif how == 1:
        older = sorted(folder.parent.glob("step-????????"))[-2]
        shutil.copy(older / "manifest.json", folder)
    else:
        first = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(first)


def to_newest(harm: Callable[[Path, random.Random], None]) -> Callable:
    return lambda run_dir, draw: harm(newest(run_dir), draw)


def flip_all(run_dir: Path, draw: random.Random) -> None:
    for folder in (run_dir / "checkpoints").glob("step-*"):
        flip(folder, draw)


def age(run_dir: Path, draw: random.Random) -> None:
    """The newest is damaged, and all older files are of the year 2099."""
    flip(newest(run_dir), draw)
    for path in (run_dir / "checkpoints").rglob("*"):
        if newest(run_dir) not in (path, path.parent):
            os.utime(path, (YEAR_2099_S, YEAR_2099_S))


def reuse_pid(run_dir: Path, draw: random.Random) -> None:
    """The lock of a dead run names a process that lives."""
    holder = json.loads((run_dir / ".lock").read_text())
    (run_dir / ".lock").write_text(json.dumps(holder | {"pid": os.getpid()}))


# Tries of another shape


def storm(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """One fault after another until the run is done: at least 20."""
    _, reference = lab.reference(*row.reference)
    run_dir, n_faults = lab.new("storm"), 0
    while n_faults < 200:
        attempt = lab.resume(run_dir, *row.reference)
        act = draw.choice(row.act)
        target = draw.choice(("rank", "launcher", "group"))
        blow = Scenario("", "", target=target)
        strike(blow, attempt, act, draw.randrange(2), draw.uniform(0.3, 1.2) * lab.run_s, "time")
        if attempt.wait() == 0:
            break
        if left := attempt.orphans():
            return f"processes are left: {left}"
        n_faults += 1
    if n_faults not in range(20, 200):
        return f"done, or not, after {n_faults} faults"
    return difference(run_dir, reference)


def detected(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """A hundred damages of one checkpoint, each seen by its verification."""
    from gptrain.resilience.manifest import DamagedCheckpoint
    from gptrain.resilience.store import CheckpointStore

    run_dir = lab.cut_back(lab.n_steps, *row.reference)
    folder = newest(run_dir)
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    for number in range(100):
        harm = draw.choice((flip, truncate, mix_up))
        harm(folder, draw)
        try:
            CheckpointStore(folder.parent).verify(folder)
        except DamagedCheckpoint:
            pass
        else:
            return f"{number}: {harm.__name__} was not seen"
        for path, content in kept.items():
            path.write_bytes(content)
    return None


def crowd(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """Four starts in one folder: one runs, the others are refused and name it."""
    run_dir = lab.new("crowd")
    attempts = [lab.resume(run_dir, "trainer.max_steps=1000000") for _ in range(4)]
    give_up_s = time.monotonic() + 60
    while len(left := [one for one in attempts if one.code is None]) > 1:
        if time.monotonic() > give_up_s:
            return f"{len(left)} of them run"
        time.sleep(0.02)
    if not left:
        return f"exit codes {[one.code for one in attempts]}"
    holder, refused = left[0], [one for one in attempts if one is not left[0]]
    while not (run_dir / "witness-0.txt").exists() and holder.code is None:
        time.sleep(0.02)
    send(Signals.SIGTERM, "launcher", 0, holder.process.pid)
    named = f"process {holder.process.pid} on "
    if any(one.code != 73 or named not in one.text() for one in refused):
        return f"{[one.code for one in refused]}, or {named} is not said: {refused[0].text()}"
    if holder.wait() != 75:
        return f"the holder ended with {holder.code}: {holder.text()[-1500:]}"
    return "two runs have written" if repeated(run_dir) else None


def neighbours(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """Two runs that start at the same instant never meet."""
    _, reference = lab.reference()
    attempts = [lab.start(lab.new("neighbour")) for _ in range(2)]
    codes = [attempt.wait() for attempt in attempts]
    found = [difference(attempt.run_dir, reference) for attempt in attempts]
    return None if codes == [0, 0] and found == [None, None] else f"{codes}: {found}"


def other_ranks(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """Saved on two ranks, resumed on one or four at the same global batch."""
    before, _ = lab.reference(*row.reference)
    run_dir, n_ranks = lab.cut_back(10, *row.reference), draw.choice((1, 4))
    words = (*row.reference, f"trainer.devices={n_ranks}", "data.batch_size=2")
    resumed = lab.resume(run_dir, *words)
    if resumed.wait() or f"resumed on {n_ranks} ranks" not in resumed.text():
        return f"exit {resumed.code}, or it is not said: {resumed.text()[-1500:]}"
    ours, theirs = losses(run_dir), losses(before)
    worst = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    # fp32 sums in another order, a few 1e-7 a step; another sample would show at 1e-2.
    return None if worst < 1e-4 else f"losses differ by {worst}"


def losses(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def changed(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """Resumed as another run: refused by name, before a rank starts."""
    key, value = draw.choice((
        ("model.d_model", "64"), ("model.dropout", "0.2"), ("seed", "7"), ("optimizer.lr", "1e-3"),
        ("data.num_samples", "61"), ("data.global_batch_size", "16"),
        ("scheduler.min_factor", "0.5"),
    ))  # fmt: skip
    run_dir = lab.cut_back(10)
    before = (run_dir / "witness-0.txt").read_text()
    attempt = lab.resume(run_dir, f"{key}={value}")
    code, text = attempt.wait(), attempt.text()
    if code != 2 or f"error: {key}=" not in text or text.count("error:") != 1:
        return f"{key}: exit {code}: {text}"
    if (run_dir / "witness-0.txt").read_text() != before:
        return f"{key}: it trained"
    return None


def sweep(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """Of a sweep of three jobs the second is killed: the others are done, the table says it."""
    _, reference = lab.reference()
    fault = "+callbacks.fault._target_=tests.campaign.faults.Fault +callbacks.fault.act=SIGKILL "
    fault += "+callbacks.fault.phase=log +callbacks.fault.rank=1 +callbacks.fault.step=999,7,999"
    attempt = lab.start(lab.new("sweep"), "-m", *fault.split())
    if attempt.wait(120) != 70 or not re.search(r"1  failed \(70\)", attempt.text()):
        return f"exit {attempt.code}: {attempt.text()[-1500:]}"
    found = [difference(attempt.run_dir / number, reference) for number in "02"]
    return None if found == [None, None] else f"the others differ: {found}"

"""Try a scenario once, and return None if every promise held, or a description of the failure."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gptrain.checkpoints.status import read_status
from tests.tools.campaign.faults import HOOKS
from tests.tools.campaign.runs import EVERY, Attempt, Lab, difference, repeated


@dataclass(frozen=True)
class Scenario:
    """A row of the table."""

    fault: str  # number in the project's list of faults
    what: str
    # Options of `faults.Fault`, drawn at random. Without an act, the try resumes a copy of the
    # reference run that is cut back to an earlier checkpoint.
    acts: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("time",)  # "time": a signal at a random moment
    rank: int | None = None  # None: drawn
    step: int | None = None  # None: drawn; -1: the last
    target: str = "rank"
    operation: tuple[int, int] = (0, 0)  # drawn from this range
    always: bool = False
    codes: tuple[int, ...] = (70,)  # any of these; after 0 it must equal the reference
    cause: str | None = None  # the cause in status.json
    blames: bool = False  # status.json names the rank
    says: str = ""  # a pattern in the output
    within_s: float = 12.0  # longest time between the fault and the end of the run
    harm: Callable[[Path, Random], None] | None = None  # done to the newest checkpoint
    again: int | None = 0  # exit code; None: no resume
    redo: int = EVERY  # micro-steps that may be done twice
    twice: bool = False  # the run that is done is started once more, and does nothing
    reference: tuple[str, ...] = ()  # words of all starts, and of the reference
    first: tuple[str, ...] = ()  # words of the first start alone
    until_done: bool = False  # one fault after another, at least 20, until the run is done
    tries: int = 10
    quick: bool = False  # tried once with --quick

    def attempt(self, lab: Lab, number: int) -> str | None:
        """Make the try with this number. An exception of the campaign itself is a failure, too."""
        draw = Random(f"{self.fault} {self.what} {number}")
        try:
            return (storm if self.until_done else try_fault)(self, lab, draw)
        except (OSError, ValueError, LookupError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def try_fault(row: Scenario, lab: Lab, draw: Random) -> str | None:
    """Cause the fault, check the end, do the harm, resume, and compare with the reference."""
    _, reference = lab.reference(*row.reference)
    if row.acts:
        attempt, failure = befall(row, lab, draw)
        if failure or attempt.code == 0:
            return failure or difference(attempt.run_dir, reference)
        run_dir = attempt.run_dir
    else:
        run_dir = lab.cut_back(lab.n_steps - EVERY, *row.reference)
    if row.harm:
        row.harm(max((run_dir / "checkpoints").glob("step-????????")), draw)
    if row.again is None:
        return None
    attempt = lab.start(run_dir, *row.reference)
    if attempt.wait() != row.again or not (row.acts or re.search(row.says, attempt.text())):
        return f"resumed, exit {attempt.code} instead of {row.again}: {attempt.text()[-1500:]}"
    redone = repeated(run_dir)
    if row.acts and redone > row.redo:
        return f"{redone} steps were done again"
    if row.twice and (lab.start(run_dir, *row.reference).wait() or repeated(run_dir) != redone):
        return "started when it was done, it failed or trained on"
    return None if row.again else difference(run_dir, reference)


def befall(row: Scenario, lab: Lab, draw: Random, run_dir: Path | None = None) -> tuple:
    """Start a run with the fault, and return the run and a description of a wrong ending."""
    act, phase = draw.choice(row.acts), draw.choice(row.phases)
    rank = draw.randrange(2) if row.rank is None else row.rank
    step = draw.randrange(1, lab.n_steps - 4) if row.step is None else row.step
    step = 0 if phase in ("setup", "start") else lab.n_steps if step == -1 else step
    fault = {"act": act, "phase": phase, "rank": rank, "step": step, "target": row.target}
    fault |= {"operation": draw.randint(*row.operation), "always": row.always}
    words = (*(fault_words(**fault) if phase in HOOKS else ()), *row.reference, *row.first)
    attempt = lab.start(run_dir or lab.new(f"{row.fault}-{phase}"), *words)
    if phase == "time":
        strike(attempt, act, row.target, rank, draw.uniform(0, lab.run_s))
    marker, struck_s = attempt.run_dir / "planted", time.time()
    code, text = attempt.wait(), attempt.text()
    if code == 0 and phase == "time":  # the run was done before the signal
        return attempt, None
    while (left := attempt.left()) and time.time() < struck_s + 60:
        time.sleep(0.05)
    took_s = time.time() - (marker.stat().st_mtime if marker.exists() else struck_s)
    status, pattern = read_status(attempt.run_dir) or {}, row.says.format(rank=rank, step=step)
    promises = {
        f"exit {code} instead of {row.codes}": code in row.codes,
        f"processes left: {left}": not left,
        f"cause {status.get('cause')}": not (code and row.cause) or status["cause"] == row.cause,
        f"rank {status.get('rank')}": not (code and row.blames) or status["rank"] == rank,
        f"{pattern} is not in the output": re.search(pattern, text) is not None,
        f"it took {took_s:.1f} s": not code or took_s < row.within_s,
        "half a save is left": not list(attempt.run_dir.glob("*/.draft*")) or row.cause != "disk",
    }
    broken = [promise for promise, holds in promises.items() if not holds]
    about = f"{act} of rank {rank} in {phase} at step {step}: {broken}: {text[-1500:]}"
    return attempt, about if broken else None


def fault_words(**options: object) -> list[str]:
    """Return the overrides that add a fault."""
    options["_target_"] = "tests.tools.campaign.faults.Fault"
    return [f"+callbacks.fault.{key}={value}" for key, value in options.items()]


def strike(attempt: Attempt, act: str, target: str, rank: int, after_s: float) -> None:
    """Send a signal to a run after some seconds."""
    time.sleep(after_s)
    pid = attempt.process.pid
    while attempt.code is None:
        with suppress(OSError, IndexError):  # the rank has not started, or it has ended
            ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            place = int(ranks[rank]) if target == "rank" else -pid if target == "group" else pid
            return os.kill(place, signal.Signals[act])
        time.sleep(0.01)


def flip(folder: Path, draw: Random) -> None:
    """Flip one bit of a random file."""
    path = draw.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(folder: Path, draw: Random) -> None:
    """Truncate a random file to 0 bytes, 1 byte or a random length."""
    path = draw.choice(sorted(folder.iterdir()))
    os.truncate(path, draw.choice((0, 1, draw.randrange(path.stat().st_size))))


def mix_up(folder: Path, draw: Random) -> None:
    """Remove a random file, or replace the manifest by that of another step."""
    older = min(folder.parent.glob("step-*")) / "manifest.json"
    path = draw.choice(sorted(folder.iterdir()))
    path.unlink() if draw.random() < 0.5 else shutil.copy(older, folder)


def storm(row: Scenario, lab: Lab, draw: Random) -> str | None:
    """Cause one fault after another until the run is done, and at least 5 faults."""
    run_dir, (_, reference) = lab.new(f"{row.fault}-storm"), lab.reference(*row.reference)
    for n_faults in range(200):
        attempt, failure = befall(row, lab, draw, run_dir)
        if failure or (attempt.code == 0 and n_faults < 5):
            return failure or f"done after {n_faults} faults"
        if attempt.code == 0:
            return difference(run_dir, reference)
    return "never done"

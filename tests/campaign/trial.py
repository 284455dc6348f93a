"""One try of a scenario: None where all that was promised held, else what did not."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gptrain.resilience.status import read_status
from tests.campaign.faults import HOOKS
from tests.campaign.lab import EVERY, Attempt, Lab
from tests.campaign.truth import difference, repeated


@dataclass(frozen=True)
class Scenario:
    """A row of the table."""

    fault: str  # number in the project's list of faults
    what: str
    # Of `faults.Fault`; no act: a copy of the reference run, cut back to an earlier checkpoint.
    acts: tuple[str, ...] = ()  # one of which is drawn
    phases: tuple[str, ...] = ("time",)  # likewise; "time": a signal at a random moment
    rank: int | None = None  # None: drawn
    step: int | None = None  # None: drawn; -1: the last
    target: str = "rank"
    operation: tuple[int, int] = (0, 0)  # drawn from this range
    always: bool = False
    # The end of the run.
    codes: tuple[int, ...] = (70,)  # any of these; after 0 it must equal the reference
    cause: str | None = None  # of status.json
    blames: bool = False  # status.json names the rank
    says: str = ""  # a pattern in the output
    within_s: float = 12.0  # from the fault to the end
    # The resume.
    harm: Callable[[Path, random.Random], None] | None = None  # done to the newest checkpoint
    again: int | None = 0  # exit code; None: no resume
    redo: int = EVERY  # micro-steps that may be done twice
    twice: bool = False  # the run that is done is started once more, and does nothing
    # Words of the command line: of all starts and the reference, of all starts, of the first.
    reference: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    quick: int = 0  # tries
    full: int = 10
    one_try: Callable[[Scenario, Lab, random.Random], str | None] | None = None  # of another shape

    def attempt(self, lab: Lab, number: int, seed: int = 0) -> str | None:
        """The try of this number; an exception of the campaign itself is a failure, too."""
        draw = random.Random(f"{seed} {self.fault} {self.what} {number}")
        try:
            return (self.one_try or try_fault)(self, lab, draw)
        except (OSError, ValueError, LookupError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def try_fault(row: Scenario, lab: Lab, draw: random.Random) -> str | None:
    """The fault, the end, the harm, the resume, and the comparison with the reference."""
    _, reference = lab.reference(*row.reference)
    if row.acts:
        attempt, found = befall(row, lab, draw)
        if found or attempt.code == 0:
            return found or difference(attempt.run_dir, reference)
        run_dir = attempt.run_dir
    else:
        run_dir = lab.cut_back(lab.n_steps - EVERY, *row.reference)
    if row.harm is not None:
        row.harm(max((run_dir / "checkpoints").glob("step-????????")), draw)
    if row.again is None:
        return None
    attempt = lab.resume(run_dir, *row.reference, *row.words)
    if attempt.wait() != row.again or not (row.acts or re.search(row.says, attempt.text())):
        return f"resumed, exit {attempt.code} instead of {row.again}: {attempt.text()[-1500:]}"
    if row.again:
        return None
    redone = repeated(run_dir)
    if row.acts and redone > row.redo:
        return f"{redone} steps were done again"
    if row.twice and (lab.resume(run_dir, *row.reference).wait() or repeated(run_dir) != redone):
        return "started when it was done, it failed or trained on"
    return difference(run_dir, reference)


def befall(row: Scenario, lab: Lab, draw: random.Random) -> tuple[Attempt, str | None]:
    """A run with the fault, and whether it ended as it should."""
    act, phase = draw.choice(row.acts), draw.choice(row.phases)
    rank = draw.randrange(2) if row.rank is None else row.rank
    step = draw.randrange(1, lab.n_steps - 4) if row.step is None else row.step
    step = 0 if phase in ("setup", "start") else lab.n_steps if step == -1 else step
    words, keys = (*row.reference, *row.words, *row.first), {"operation": 0, "always": row.always}
    if phase in HOOKS:
        keys |= {"act": act, "phase": phase, "rank": rank, "step": step, "target": row.target}
        words = (*fault_words(**keys | {"operation": draw.randint(*row.operation)}), *words)
    attempt = lab.start(lab.new(f"{row.fault}-{phase}"), *words)
    if phase == "time":
        strike(attempt, act, row.target, rank, draw.uniform(0, lab.run_s))
    marker, struck_s = attempt.run_dir / "planted", time.time()
    code, text, left = attempt.wait(), attempt.text(), attempt.orphans()
    if code == 0 and phase == "time":  # it was done before
        return attempt, None
    took_s = time.time() - (marker.stat().st_mtime if marker.exists() else struck_s)
    status, says = read_status(attempt.run_dir) or {}, row.says.format(rank=rank, step=step)
    promises = {
        f"exit {code} instead of {row.codes}": code in row.codes,
        f"processes left: {left}": not left,
        f"cause {status.get('cause')}": not (code and row.cause) or status["cause"] == row.cause,
        f"rank {status.get('rank')}": not (code and row.blames) or status["rank"] == rank,
        f"{says} is not said": re.search(says, text) is not None,
        f"it took {took_s:.1f} s": not code or took_s < row.within_s,
        "half a save is left": not list(attempt.run_dir.glob("*/.draft*")) or row.cause != "disk",
    }
    broken = [promise for promise, holds in promises.items() if not holds]
    about = f"{act} of rank {rank} in {phase} at step {step}: {broken}: {text[-1500:]}"
    return attempt, about if broken else None


def fault_words(**keys: object) -> list[str]:
    """What to type for a fault in a rank."""
    keys["_target_"] = "tests.campaign.faults.Fault"
    return [f"+callbacks.fault.{key}={value}" for key, value in keys.items()]


def strike(attempt: Attempt, act: str, target: str, rank: int, after_s: float) -> None:
    """Sends a signal to a run, whatever it is doing then."""
    time.sleep(after_s)
    places = {"launcher": attempt.process.pid, "group": -attempt.process.pid}
    while attempt.code is None:
        ranks = attempt.ranks()
        with suppress(ProcessLookupError):
            if target in places or len(ranks) > rank:
                return os.kill(places.get(target) or ranks[rank], signal.Signals[act])
        time.sleep(0.01)

"""One try of a scenario: None where all that was promised held, else what did not."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from gptrain.resilience.status import read_status
from tests.campaign.faults import HOOKS
from tests.campaign.lab import EVERY, Attempt, Lab
from tests.campaign.truth import difference, repeated


@dataclass(frozen=True)
class Scenario:
    """A row of the table. Of a tuple of acts or phases one is drawn.

    Attributes:
        fault: its number in the project's list of faults.   what: in a few words.
        act, phase, rank, step, target, operation, always: of `faults.Fault`. act "": none, but a
            copy of the reference run, cut back to an earlier checkpoint; rank, step None: drawn;
            step -1: the last; operation (1, 9): drawn; phase "time": a signal at a random moment.
        code: exit code of the run, any of a tuple; after 0 it must equal the reference.
        cause: of status.json.   blames: status.json names the rank.
        says: a pattern in the output.   within_s: from the fault to the end.
        harm: done to the run folder before the resume.
        again: exit code of the resume; None: no resume.   redo: micro-steps done twice at most.
        twice: the run that is done is started once more, and does nothing.
        reference: words of all starts and of the reference.   words: of all starts.
        first, env: of the first start alone.
        quick, full: tries in a quick and in a full campaign.   one_try: of another shape.
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
    one_try: Callable[[Scenario, Lab, random.Random], str | None] | None = None

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
    attempt = lab.resume(run_dir, *row.reference, *row.words)
    if attempt.wait() != row.again or not (row.act or re.search(row.says, attempt.text())):
        return f"resumed, exit {attempt.code} instead of {row.again}: {attempt.text()[-1500:]}"
    if row.again:
        return None
    if found := difference(run_dir, reference):
        return found
    before = repeated(run_dir)
    if row.act and before > row.redo:
        return f"{before} steps were done again"
    if row.twice and (lab.resume(run_dir, *row.reference).wait() or repeated(run_dir) != before):
        return "started when it was done, it failed or trained on"
    return difference(run_dir, reference) if row.twice else None


def befall(row: Scenario, lab: Lab, draw: random.Random) -> tuple[Attempt, str | None]:
    """A run with the fault, and whether it ended as it should."""
    act = row.act if isinstance(row.act, str) else draw.choice(row.act)
    phase = row.phase if isinstance(row.phase, str) else draw.choice(row.phase)
    rank = draw.randrange(2) if row.rank is None else row.rank
    step = draw.randrange(1, lab.n_steps - 4) if row.step is None else row.step
    step = 0 if phase in ("setup", "start") else lab.n_steps if step == -1 else step
    words = (*row.reference, *row.words, *row.first)
    if phase in HOOKS:
        keys = {"_target_": "tests.campaign.faults.Fault", "act": act, "phase": phase}
        keys |= {"rank": rank, "step": step, "target": row.target, "always": row.always}
        keys["operation"] = draw.randint(*row.operation)
        words += tuple(f"+callbacks.fault.{key}={value}" for key, value in keys.items())
    attempt = lab.start(lab.new(f"{row.fault}-{phase}"), *words, env=row.env)
    if phase == "time":
        strike(attempt, Signals[act], row.target, rank, draw.uniform(0, lab.run_s))
    marker, struck_s = attempt.run_dir / "planted", time.time()
    code, text = attempt.wait(), attempt.text()
    if code == 0 and phase == "time":  # it was done before
        return attempt, None
    took_s = time.time() - (marker.stat().st_mtime if marker.exists() else struck_s)
    status, says = read_status(attempt.run_dir) or {}, row.says.format(rank=rank, step=step)
    codes = row.code if isinstance(row.code, tuple) else (row.code,)
    promises = {
        f"exit {code} instead of {row.code}": code in codes,
        f"processes left: {attempt.orphans()}": not attempt.orphans(),
        f"cause {status.get('cause')}": not (code and row.cause) or status["cause"] == row.cause,
        f"rank {status.get('rank')}": not (code and row.blames) or status["rank"] == rank,
        f"{says} is not said": re.search(says, text) is not None,
        f"it took {took_s:.1f} s": not code or took_s < row.within_s,
        "half a save is left": row.cause != "disk"
        or not list(attempt.run_dir.glob("checkpoints/.draft*")),
    }
    broken = [words for words, holds in promises.items() if not holds]
    about = f"{act} of rank {rank} in {phase} at step {step}: {broken}: {text[-1500:]}"
    return attempt, about if broken else None


def strike(attempt: Attempt, number: int, target: str, rank: int, after_s: float) -> None:
    """Sends a signal to a run, whatever it is doing then."""
    time.sleep(after_s)
    pid = attempt.process.pid
    while attempt.code is None:
        ranks = attempt.ranks()
        with suppress(ProcessLookupError):
            if target != "rank" or len(ranks) > rank:
                return os.kill({"launcher": pid, "group": -pid}.get(target) or ranks[rank], number)
        time.sleep(0.01)

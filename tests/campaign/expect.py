"""What must be true after a fault: None where it is, else what is not."""

from __future__ import annotations

import time
from pathlib import Path

from tests.campaign.lab import Attempt, Lab
from tests.campaign.truth import difference, redone

LEAVE_S = 10.0  # for the others, once a rank has failed


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
        return left
    status = attempt.status()
    if cause is not None and status.get("cause") != cause:
        return f"status.json says {status.get('cause')}, not {cause}: {status.get('message')}"
    if rank is not None and status.get("rank") != rank:
        return f"status.json names rank {status.get('rank')}, not {rank}: {status.get('message')}"
    planted = attempt.run_dir / f"planted-{rank}"
    if planted.exists() and time.time() - planted.stat().st_mtime > LEAVE_S:
        return f"it took {time.time() - planted.stat().st_mtime:.1f} s to end"
    return None

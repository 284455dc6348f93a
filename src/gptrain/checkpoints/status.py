"""How a run ended: the exceptions that mean an ending, `status.json`, `result.json`.

When several ranks fail, the first one writes the status: the others fail only because of it.
"First" is decided by the file system: a hard link to a finished file can be made once, so of any
number of writers exactly one wins, and nobody ever reads half a status.
"""

import json
import math
import os
import socket
import time
import uuid
from pathlib import Path

from gptrain.checkpoints import fileops
from gptrain.core.errors import DONE
from gptrain.core.small_files import read_facts

STATUS_NAME = "status.json"
RESULT_NAME = "result.json"
CHECKPOINTS_NAME = "checkpoints"  # the folder of a run that was trained


class PreemptedError(BaseException):
    """The run was asked to stop, saved itself and left; the same command goes on with it.

    No Exception, as KeyboardInterrupt is none: a signal's handler may raise it inside any library,
    whose `except Exception` would make another error of it (Hydra: "Error locating target").

    Args:
        step: optimizer steps that are done and saved; None where there was nothing to save.
    """

    cause = "preempted"

    def __init__(self, step: int | None = None) -> None:
        what = "there was nothing to save" if step is None else f"saved at step {step}"
        super().__init__(f"asked to stop: {what}")
        self.step = step


class NonFiniteError(Exception):
    """A loss or a gradient was NaN or infinite; the weights are those of the step before.

    Args:
        step: the optimizer step, counted from 0.
        rank: the first rank whose own loss was not finite, None where only gradients were.
        samples: those that the step had read: that rank's, or all.
        place: what was first not finite, in words.

    Attributes:
        why: why the step was not skipped.
    """

    cause = "nonfinite"

    def __init__(self, step: int, rank: int | None, samples: list[int], place: str = "") -> None:
        where = "the gradients of all ranks" if rank is None else f"the loss of rank {rank}"
        verb = "are" if rank is None else "is"
        text = f"{where} at step {step} {verb} not finite; samples: {shorten(samples)}"
        super().__init__(text + (f"; {place}" if place else ""))
        self.rank, self.why = rank, ""

    def __str__(self) -> str:
        return super().__str__() + self.why


def shorten(samples: list[int]) -> str:
    """The first of many numbers."""
    return ", ".join(map(str, samples[:16])) + (", …" if len(samples) > 16 else "")


def write_status(run_dir: str | Path, *, replace: bool = False, **facts: object) -> bool:
    """Whether this became the run's status: False if another rank was first.

    The failure of a rank replaces another's word that the run is done.

    Args:
        replace: put it in place of an earlier status; for the supervisor, which alone knows that a
            rank was killed before the others noticed.
        facts: cause (one word for machines: done, preempted, hang, nonfinite, killed, error …),
            exit_code, rank, step, checkpoint (the newest good one), resume (the command that goes
            on from it), message, traceback.
    Raises: OSError if the folder cannot be written.
    """
    path = Path(run_dir) / STATUS_NAME
    place = {"host": socket.gethostname(), "pid": os.getpid()}
    status = to_json(facts | place | {"time": time.strftime("%F %T %z")})
    was_done = (read_status(run_dir) or {}).get("exit_code") == DONE
    if replace or (was_done and facts["exit_code"] != DONE):
        fileops.replace(path, status)
        return True
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    fileops.write_new_file(beside, status)
    try:
        os.link(beside, path)
    except OSError:
        if path.exists():
            return False
        os.rename(beside, path)  # no hard links here (FAT, some network mounts)
    finally:
        beside.unlink(missing_ok=True)
    fileops.sync_folder(path.parent)
    return True


def read_status(run_dir: str | Path) -> dict | None:
    """The status of the last attempt; None if there is none that can be read, or none of ours."""
    status = read_facts(Path(run_dir) / STATUS_NAME)
    return status if isinstance(status.get("exit_code"), int) else None


def clear_status(run_dir: str | Path) -> None:
    """Makes room for a new attempt's: call it under the run lock, before any rank starts."""
    (Path(run_dir) / STATUS_NAME).unlink(missing_ok=True)


def write_result(path: str | Path, metrics: dict[str, float], **facts: object) -> None:
    """The result of a run that is done: final metrics under their logged names, and facts.

    A metric that is not finite becomes null.
    """
    fileops.replace(Path(path), to_json({"metrics": metrics} | facts))


def to_json(value: object) -> bytes:
    """Indented JSON; nan and inf, which JSON does not know, become null, paths text."""
    return json.dumps(_finite(value), indent=1, allow_nan=False, default=str).encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

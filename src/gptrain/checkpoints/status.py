"""How a run ended: `status.json`, `result.json`, and the exceptions that end a run.

When several ranks fail, the first rank writes the status, because the other ranks fail only as a
consequence. The file system decides which rank is first: it makes the file for exactly one of them.
"""

import os
import socket
import time
from pathlib import Path

from gptrain.checkpoints import files
from gptrain.core.errors import DONE, NON_FINITE, PREEMPTED, RunError
from gptrain.core.small_files import read_facts

STATUS_NAME = "status.json"
RESULT_NAME = "result.json"
CHECKPOINTS_NAME = "checkpoints"  # folder of the checkpoints in the folder of a run


class PreemptedError(BaseException):
    """Raised to end a run that was asked to stop (exit code 75), after a save of its state, if any.

    Like KeyboardInterrupt, this is not an Exception: a signal handler may raise it inside any
    library, whose `except Exception` would turn it into another error.

    Args:
        step: Number of optimizer steps that are done and saved. None if there was nothing to save.
    """

    code = PREEMPTED
    cause = "preempted"

    def __init__(self, step: int | None = None) -> None:
        result = "there was nothing to save" if step is None else f"saved at step {step}"
        super().__init__(f"asked to stop: {result}")


class RefusedStepError(RunError):
    """Raised to end a run because a step, or `max_skips` in a row, were left out.

    `step` is the number of the last one, counted from 0. The weights are those from before it.
    `cause` is "nonfinite" if its loss or gradient was NaN or infinite, or "spike".
    """

    code = NON_FINITE

    def __init__(self, message: str, step: int, cause: str) -> None:
        super().__init__(message)
        self.step, self.cause = step, cause


def write_status(run_dir: str | Path, *, replace: bool = False, **facts: object) -> bool:
    """Write how a run ended to status.json, unless another rank has written it before.

    A failure always replaces the status of a run that is done. The host, the process number and the
    time are added.

    Args:
        run_dir: Folder of the run.
        replace: Whether to replace an existing status. The parent of local ranks needs this: only
            the parent knows that a rank was killed before the other ranks failed.
        facts: Entries of the status: exit_code, which is required, cause (such as `disk`), rank,
            step, checkpoint (newest one), resume (command for it), message, traceback.

    Returns:
        Whether this call has written the file.

    Raises:
        OSError: If the file cannot be written.
    """
    path = Path(run_dir) / STATUS_NAME
    place = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.strftime("%F %T %z")}
    text = files.to_json(facts | place)
    was_done = (read_status(run_dir) or {}).get("exit_code") == DONE
    if replace or (was_done and facts["exit_code"] != DONE):
        files.replace(path, text)
        return True
    try:
        files.write_new_file(path, [text])
        files.sync_folder(path.parent)
    except FileExistsError:
        return False
    return True


def read_status(run_dir: str | Path) -> dict | None:
    """Return the content of status.json, or None if it is missing or has no integer `exit_code`."""
    status = read_facts(Path(run_dir) / STATUS_NAME)
    return status if isinstance(status.get("exit_code"), int) else None

"""A question that all ranks answer without a collective operation, after an error.

A save needs all ranks. If only one rank has failed, the other ranks wait in a collective operation
of the training, and a second collective operation would hang. So the failed ranks exchange small
files in a shared folder, and wait for each other for a few seconds only.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptrain.checkpoints import fileops

POLL_S = 0.05
_VERDICT = "verdict"


def all_agree(folder: str | Path, rank: int, world_size: int, value: Any, wait_s: float) -> bool:
    """Return whether every rank has called this function with an equal value, within a time limit.

    All ranks that call it get the same result. The first rank that has seen all values, or that has
    waited for `wait_s`, writes the result to a file, and the other ranks read it. With one rank the
    result is True.

    Args:
        folder: Folder that all ranks share. It must be empty or missing before the first call.
        rank: Global rank of this process.
        world_size: Number of ranks.
        value: Value of this rank, which JSON can hold. It must not be None.
        wait_s: Longest time to wait for the other ranks, in seconds.

    Raises:
        OSError: If the folder cannot be read or written.
    """
    if world_size == 1:
        return True
    folder = Path(folder)
    give_up_s = time.monotonic() + wait_s
    folder.mkdir(parents=True, exist_ok=True)
    fileops.create_once(folder / f"rank-{rank}", json.dumps(value).encode())
    while (verdict := _read(folder / _VERDICT)) is None:
        values = [_read(folder / f"rank-{other}") for other in range(world_size)]
        if None not in values or time.monotonic() > give_up_s:
            is_agreed = all(answer is not None and answer == values[0] for answer in values)
            fileops.create_once(folder / _VERDICT, json.dumps(is_agreed).encode())
        else:
            time.sleep(POLL_S)
    return verdict


def _read(path: Path) -> Any:
    """Return the value in a JSON file, or None if the file is missing."""
    with suppress(FileNotFoundError):
        return json.loads(path.read_bytes())
    return None

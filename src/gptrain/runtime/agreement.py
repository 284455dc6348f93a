"""Whether all ranks of a job have failed at the same point, asked without a collective.

A save needs all ranks. Where one rank alone has failed, the others wait in a collective, and a rank
that waits for them in another one hangs. So the ranks that fail ask each other by small files in a
folder that they share, and only for a few seconds.
"""

import json
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptrain.checkpoints import fileops

POLL_S = 0.05
_VERDICT = "verdict"


def all_agree(folder: str | Path, rank: int, world_size: int, value: Any, wait_s: float) -> bool:
    """Return whether every rank has called this with an equal value; the same on all that call it.

    A rank that waited for too long decides against, and only the first verdict counts: no rank
    acts on an agreement that another rank has given up.

    Args:
        folder: Empty before the first rank calls this; used for one question.
        value: Plain values.
        wait_s: How long to wait for the ranks that have not called it.
    """
    if world_size == 1:
        return True
    folder, give_up_s = Path(folder), time.monotonic() + wait_s
    folder.mkdir(parents=True, exist_ok=True)
    _write_once(folder / f"rank-{rank}", value)
    while (verdict := _read(folder / _VERDICT)) is None:
        values = [_read(folder / f"rank-{other}") for other in range(world_size)]
        if None not in values:
            _write_once(folder / _VERDICT, all(other == values[0] for other in values))
        elif time.monotonic() > give_up_s:
            _write_once(folder / _VERDICT, False)
        else:
            time.sleep(POLL_S)
    return verdict


def _write_once(path: Path, value: Any) -> None:
    """Write a file, all of it at once, unless there is one of this name already."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    fileops.write_new_file(beside, json.dumps(value).encode())
    with suppress(FileExistsError):
        os.link(beside, path)
    beside.unlink()


def _read(path: Path) -> Any:
    with suppress(FileNotFoundError):
        return json.loads(path.read_bytes())
    return None

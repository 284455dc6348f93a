"""Deletes the checkpoints of runs, all but the newest and the best."""

from __future__ import annotations

import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptrain.checkpoints.lock import LOCK_NAME, RunLock
from gptrain.checkpoints.manifest import NoGoodCheckpointError, folder_name
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core.errors import FOLDER_UNUSABLE, ConfigError, first_line, printable
from gptrain.runs.folder import RunRecord


@dataclass(frozen=True)
class Surplus:
    """The checkpoints of one run that a prune deletes, and those that it keeps."""

    run: Path
    kept: list[Path]
    deleted: list[Path]


def prune(runs: Sequence[RunRecord], is_confirmed: bool) -> str:
    """Delete all but the newest and the best checkpoint of each run, and return what was done.

    Everything is shown before anything is deleted. Copies in a mirror stay.

    Args:
        is_confirmed: Whether --yes was typed; otherwise a person at a terminal is asked.

    Raises:
        ConfigError: If a run is going on, its checkpoints are a link, or nobody confirmed.
    """
    found = [find_surplus(run) for run in runs]
    chosen = [surplus for surplus in found if surplus.deleted]
    if not chosen:
        return "nothing to delete: each run has its newest and its best checkpoint alone"
    for surplus in chosen:
        for path in surplus.deleted:
            print(f"delete    {printable(path)} · {size_of(path) / 2**20:,.1f} MiB")
        names = ", ".join(path.name for path in surplus.kept)
        print(f"keep      {printable(surplus.run)}: {names}", flush=True)
    n_bytes = sum(size_of(path) for surplus in chosen for path in surplus.deleted)
    n_paths = sum(len(surplus.deleted) for surplus in chosen)
    if not is_confirmed and not ask(f"delete {n_paths} checkpoints? [y/N] "):
        raise ConfigError.of("--prune", None, "nothing was deleted", hint="--prune FOLDER --yes")
    for surplus in chosen:
        with RunLock(surplus.run, wait_s=0.0):  # no start of this run may read them meanwhile
            for path in surplus.deleted:
                shutil.rmtree(path)  # which removes a link and does not follow it
    return f"deleted {n_paths} checkpoints, {n_bytes / 2**20:,.1f} MiB; copies in a mirror stay"


def find_surplus(run: RunRecord) -> Surplus:
    """Return which checkpoints of a run are neither the newest nor the best.

    Raises:
        ConfigError: If the run is going on, or its folder of checkpoints lies behind a link.
    """
    folder = run.path / CHECKPOINTS_NAME
    if run.ended == "running":
        raise refused(run.path, "is running; wait for it, or stop it")
    if folder.is_symlink() or (run.path / LOCK_NAME).is_symlink():
        raise refused(folder, "a link; what it leads to is not deleted")
    store = CheckpointStore(folder)
    monitor = str(run.config.get("checkpoint.monitor", "val/loss"))
    mode = "max" if run.config.get("checkpoint.mode") == "max" else "min"
    try:  # every byte of what is kept is read: a damaged newest one is not relied upon
        verified = [store.best(monitor, mode), store.newest_good()]
    except NoGoodCheckpointError as error:
        raise refused(folder, f"nothing was deleted: {first_line(error)}") from error
    kept = {checkpoint.path for checkpoint in verified if checkpoint}
    kept |= {path for path in [store.newest()] if path}
    steps = [folder / folder_name(step) for step in store.steps()]
    deleted = [path for path in steps if path not in kept and not path.is_symlink()]
    return Surplus(run.path, sorted(kept), deleted)


def size_of(path: Path) -> int:
    """Return the bytes of the files of a folder, without following a link."""
    modes = (entry.lstat() for entry in path.rglob("*"))
    return sum(mode.st_size for mode in modes if stat.S_ISREG(mode.st_mode))


def ask(question: str, read: Callable[[str], str] = input) -> bool:
    """Return whether a person at a terminal answers yes; without a terminal nobody does."""
    return sys.stdin.isatty() and read(question).strip().lower() in ("y", "yes")


def refused(path: Path, message: str) -> ConfigError:
    return ConfigError.of("--prune", str(path), message, code=FOLDER_UNUSABLE)

"""Deletion of all checkpoints of a run but the newest and the best."""

import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptrain.checkpoints.lock import LOCK_NAME, RunLock
from gptrain.checkpoints.manifest import AllDamagedError, folder_name
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import labels
from gptrain.core.errors import FOLDER_UNUSABLE, ConfigError, first_line, printable
from gptrain.runs.folder import RunRecord


@dataclass(frozen=True)
class Surplus:
    """Checkpoints of one run that `prune` deletes, and those that it keeps.

    Attributes:
        run: Folder of the run.
        kept: Folders of the checkpoints that are kept.
        deleted: Folders of the checkpoints that are deleted.
    """

    run: Path
    kept: list[Path]
    deleted: list[Path]


def prune(runs: Sequence[RunRecord], is_confirmed: bool) -> str:
    """Delete all but the newest and the best checkpoint of each run, and return a summary.

    Prints what will be deleted and kept before anything is deleted. Does not touch the copies in a
    mirror.

    Args:
        runs: Runs whose checkpoints are deleted.
        is_confirmed: True if --yes was typed. Otherwise the user at the terminal is asked.

    Raises:
        ConfigError: If a run is active, the folder of its checkpoints is a link, no checkpoint is
            intact, or the deletion was not confirmed.
    """
    surpluses = [find_surplus(run) for run in runs]
    chosen = [surplus for surplus in surpluses if surplus.deleted]
    if not chosen:
        return "nothing to delete: each run has only its newest and its best checkpoint"
    for surplus in chosen:
        for path in surplus.deleted:
            print(f"delete    {printable(path)} · {size_of(path) / 2**20:,.1f} MiB")
        names = ", ".join(path.name for path in surplus.kept)
        print(f"keep      {printable(surplus.run)}: {names}", flush=True)
    n_bytes = sum(size_of(path) for surplus in chosen for path in surplus.deleted)
    n_paths = sum(len(surplus.deleted) for surplus in chosen)
    if not is_confirmed and not ask(f"delete {labels.count_text(n_paths, 'checkpoint')}? [y/N] "):
        raise ConfigError.of(
            "--prune", None, "nothing was deleted: not confirmed", hint="--prune FOLDER --yes"
        )
    for surplus in chosen:
        with RunLock(surplus.run, wait_s=0.0):  # keeps the run from starting meanwhile
            for path in surplus.deleted:
                shutil.rmtree(path)  # does not follow links in the folder
    deleted = labels.count_text(n_paths, "checkpoint")
    return f"deleted {deleted}, {n_bytes / 2**20:,.1f} MiB; copies in a mirror stay"


def find_surplus(run: RunRecord) -> Surplus:
    """Return the checkpoints of a run that are neither the newest nor the best, and the kept ones.

    Reads every byte of the kept checkpoints to verify them. If the newest checkpoint is damaged,
    the newest intact one is kept as well.

    Args:
        run: Run, whose config names the metric of the best checkpoint.

    Raises:
        ConfigError: If the run is active, its lock or the folder of its checkpoints is a link, or
            no checkpoint is intact.
    """
    folder = run.path / CHECKPOINTS_NAME
    if run.ended == "running":
        raise refused(run.path, "is running; wait for its end, or stop it")
    if folder.is_symlink() or (run.path / LOCK_NAME).is_symlink():
        raise refused(folder, "is a link; checkpoints behind a link are not deleted")
    store = CheckpointStore(folder)
    monitor = str(run.config.get("checkpoint.monitor", "val/loss"))
    mode = "max" if run.config.get("checkpoint.mode") == "max" else "min"
    try:
        verified = [store.best(monitor, mode), store.newest_intact()]
    except AllDamagedError as error:
        raise refused(folder, f"nothing was deleted: {first_line(error)}") from error
    kept = {checkpoint.path for checkpoint in verified if checkpoint}
    kept |= {path for path in [store.newest()] if path}
    steps = [folder / folder_name(step) for step in store.steps()]
    deleted = [path for path in steps if path not in kept and not path.is_symlink()]
    return Surplus(run.path, sorted(kept), deleted)


def size_of(path: Path) -> int:
    """Return the size of all files in a folder, in bytes. Links are not followed."""
    entries = (entry.lstat() for entry in path.rglob("*"))
    return sum(entry.st_size for entry in entries if stat.S_ISREG(entry.st_mode))


def ask(question: str, read: Callable[[str], str] = input) -> bool:
    """Ask the user a question and return whether the answer is yes.

    Returns False without asking if stdin is not a terminal.

    Args:
        question: Text that is printed.
        read: Function that prints the question and returns the answer.
    """
    return sys.stdin.isatty() and read(question).strip().lower() in ("y", "yes")


def refused(path: Path, message: str) -> ConfigError:
    """Return the ConfigError, with exit code 73, of a run that cannot be pruned.

    Args:
        path: Run folder, or the folder of its checkpoints.
        message: Reason.
    """
    return ConfigError.of("--prune", str(path), message, code=FOLDER_UNUSABLE)

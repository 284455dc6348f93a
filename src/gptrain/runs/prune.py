"""Deletion of the checkpoints of a run that are neither the newest, nor the best, nor in use.

A checkpoint is in use if another run has trained only some weights of its net: the checkpoints of
that run refer to it instead of holding the frozen weights.
"""

import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gptrain.checkpoints.lock import LOCK_NAME, RunLock
from gptrain.checkpoints.manifest import (
    BASE,
    MANIFEST_NAME,
    AllDamagedError,
    DamagedCheckpointError,
    folder_name,
    read_manifest,
)
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import labels
from gptrain.core.errors import FOLDER_UNUSABLE, ConfigError, first_line, printable
from gptrain.core.locations import default_output_dir
from gptrain.runs.folder import RunRecord

DEPTH = 3  # levels of folders between output_dir, or the folder that holds a run, and other runs


@dataclass(frozen=True)
class Surplus:
    """Checkpoints of one run that `prune` deletes, and those that it keeps.

    Attributes:
        run: Folder of the run.
        kept: Folders of the checkpoints that are kept.
        deleted: Folders of the checkpoints that are deleted.
        users: Folder of a run that refers to a checkpoint, by the folder of the checkpoint. Such a
            checkpoint would be deleted without the reference.
    """

    run: Path
    kept: list[Path]
    deleted: list[Path]
    users: Mapping[Path, Path]


def prune(runs: Sequence[RunRecord], is_confirmed: bool) -> str:
    """Delete the surplus checkpoints of each run, and return a summary.

    A run keeps its newest checkpoint, the newest intact one, the best one, and those whose frozen
    weights another run uses. Other runs are found below the default output folder and next to the
    given runs; a run in another place is not found, and loses its frozen weights. Prints what will
    be deleted and kept before anything is deleted. Does not touch copies in `checkpoint.mirror`.

    Args:
        runs: Runs whose checkpoints are deleted.
        is_confirmed: True if --yes was typed. Otherwise the user at the terminal is asked.

    Raises:
        ConfigError: If a run is active, its lock or the folder of its checkpoints is a link, no
            checkpoint of a run is intact, or the deletion was not confirmed. Nothing was deleted
            then, unless a run was started after the confirmation.
        OSError: If a checkpoint cannot be read or deleted. Those before it are deleted.
    """
    users = find_users(runs)
    surpluses = [find_surplus(run, users) for run in runs]
    for path, user in (item for surplus in surpluses for item in surplus.users.items()):
        print(f"keep      {printable(path)}: it has the frozen weights of {printable(user)}")
    chosen = [surplus for surplus in surpluses if surplus.deleted]
    if not chosen:
        return (
            "nothing to delete: each run has only its newest and best checkpoint, and those in use"
        )
    for surplus in chosen:
        for path in surplus.deleted:
            print(f"delete    {printable(path)} · {size_of(path) / 2**20:,.1f} MiB")
        names = ", ".join(path.name for path in surplus.kept)
        print(f"keep      {printable(surplus.run)}: {names}", flush=True)
    n_bytes = sum(size_of(path) for surplus in chosen for path in surplus.deleted)
    n_paths = sum(len(surplus.deleted) for surplus in chosen)
    if not is_confirmed and not ask(f"delete {labels.count_text(n_paths, 'checkpoint')}? [y/N] "):
        message = "nothing was deleted: not confirmed"
        raise ConfigError.of("--prune", None, message, hint="--prune FOLDER --yes")
    for surplus in chosen:
        with RunLock(surplus.run, wait_s=0.0):  # keeps the run from starting meanwhile
            for path in surplus.deleted:
                shutil.rmtree(path)  # does not follow links in the folder
    deleted = labels.count_text(n_paths, "checkpoint")
    return f"deleted {deleted}, {n_bytes / 2**20:,.1f} MiB; copies in a mirror stay"


def find_users(runs: Sequence[RunRecord]) -> dict[Path, Path]:
    """Return the checkpoints to which runs refer, with the folder of one such run each.

    Looks for runs up to three levels (DEPTH) below the default output folder and below each folder
    that holds one of the given runs. A run in another place is not found. A checkpoint with a
    damaged manifest counts as one that refers to nothing.

    Args:
        runs: Runs whose checkpoints may be referred to.

    Returns:
        Folder of a run by the path of the checkpoint that has its frozen weights, without links.

    Raises:
        OSError: If the network file system does not answer.
    """
    users = {}
    roots = dict.fromkeys([Path(default_output_dir()), *(run.path.parent for run in runs)])
    patterns = [f"{'*/' * n}{CHECKPOINTS_NAME}/*/{MANIFEST_NAME}" for n in range(1, DEPTH + 1)]
    for file in (file for root in roots for pattern in patterns for file in root.glob(pattern)):
        with suppress(DamagedCheckpointError, ValueError):  # ValueError: a path with a null byte
            match read_manifest(file.parent)["config"].get(BASE):
                case {"path": str(path)}:
                    users[Path(path).resolve()] = file.parents[2]
    return users


def find_surplus(run: RunRecord, users: Mapping[Path, Path]) -> Surplus:
    """Return the checkpoints of a run that `prune` deletes, and those that it keeps.

    The newest checkpoint, the newest intact one, and the intact one with the best metric are kept.
    Every byte of the last two is read to verify them. Checkpoints in `users` are not deleted
    either; the result lists them apart. The result is empty if the run has no checkpoint.

    Args:
        run: Run, whose config names the metric of the best checkpoint.
        users: Result of `find_users`: checkpoints to which other runs refer.

    Raises:
        ConfigError: If the run is active, its lock or the folder of its checkpoints is a link, or
            there are checkpoints and none is intact.
        OSError: If the folder cannot be read, or the network file system does not answer.
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
    surplus = [path for path in steps if path not in kept and not path.is_symlink()]
    used = {path: users[path.resolve()] for path in surplus if path.resolve() in users}
    deleted = [path for path in surplus if path not in used]
    return Surplus(run.path, sorted(kept), deleted, used)


def size_of(path: Path) -> int:
    """Return the size of all files in a folder, in bytes. Links are not followed."""
    entries = (entry.lstat() for entry in path.rglob("*"))
    return sum(entry.st_size for entry in entries if stat.S_ISREG(entry.st_mode))


def ask(question: str, read: Callable[[str], str] = input) -> bool:
    """Ask the user a question and return whether the answer is yes.

    Returns False without asking if stdin is not a terminal. Ctrl-D also counts as no.

    Args:
        question: Text that is printed.
        read: Function that prints the question and returns the answer. It raises an EOFError at the
            end of the input.
    """
    if not sys.stdin.isatty():
        return False
    try:
        return read(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()  # the cursor is still in the line of the question
        return False


def refused(path: Path, message: str) -> ConfigError:
    """Return the ConfigError, with exit code 73, of a run that cannot be pruned.

    Args:
        path: Run folder, or the folder of its checkpoints.
        message: Reason.
    """
    return ConfigError.of("--prune", str(path), message, code=FOLDER_UNUSABLE)

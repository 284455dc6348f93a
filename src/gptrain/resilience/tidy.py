"""Folders put out of the way; where that fails it is a warning, not the end of a run."""

import logging
from pathlib import Path

from gptrain.resilience import fileops
from gptrain.resilience.manifest import DamagedCheckpoint

_log = logging.getLogger(__name__)


def discard(folder: Path) -> None:
    """Remove a hidden folder; what cannot be removed now goes at the next `clean` of its store."""
    try:
        if folder.exists():
            fileops.remove_tree(folder)
    except OSError as error:
        _log.warning("%s: cannot be removed now: %s", folder, error.strerror)


def set_aside(error: DamagedCheckpoint) -> None:
    """Rename a damaged checkpoint to `step-….corrupt`, or `.corrupt-2` where there is one."""
    aside = error.path.with_name(f"{error.path.name}.corrupt")
    number = 1
    while aside.exists():
        number += 1
        aside = error.path.with_name(f"{error.path.name}.corrupt-{number}")
    if rename_or_warn(error.path, aside):
        _log.warning("%s; set aside as %s", error, aside.name)


def rename_or_warn(path: Path, target: Path) -> bool:
    """Whether it could be renamed; the folder may have turned read-only."""
    try:
        fileops.rename(path, target)
    except OSError as error:
        _log.warning("%s: cannot be renamed to %s: %s", path, target.name, error.strerror)
        return False
    return True

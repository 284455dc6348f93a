"""Finds the paths in an untrusted run's config that lead outside of the project and the run.

The paths are checked once, before the run starts. A symbolic link is followed to its target.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptrain.core import locations

OUTSIDE = "outside of this project"
_MAGIC = re.compile(r"[*?\[]")


def allowed_roots(run_dir: str | Path) -> list[Path]:
    """Return the folders in which an untrusted run may read files.

    They are the working directory, the project, the output folder, and the parent of the run
    folder. A run is untrusted if this user did not start it on this machine.

    Args:
        run_dir: Folder of the run.
    """
    run = locations.expand_home(run_dir).resolve()
    project = locations.find_project() or Path.cwd()
    roots = (Path.cwd(), project, Path(locations.default_output_dir()), run.parent)
    return [root.resolve() for root in roots]


def find_outside(value: str, roots: Sequence[Path]) -> str | None:
    """Return why a config value may not be read as a path, or None if it may.

    Args:
        value: Any string of a config. A string is a path if it is absolute, contains `..`, exists,
            or is a glob.
        roots: Resolved folders. Every file below them may be read.

    Returns:
        None if the value is not a path, or if all files that it matches, and the targets of the
        links among them, are below the roots.
    """
    path = Path(os.path.expanduser(value))
    is_glob = bool(_MAGIC.search(value))
    exists = "\0" not in value and os.path.lexists(path)
    if not (exists or is_glob or path.is_absolute() or ".." in path.parts):
        return None
    # Check the fixed part of a glob before it is expanded: expanding /** would read the whole disk.
    fixed = path if exists or not is_glob else _before_wildcard(path)
    if "\0" in value or not _is_inside(fixed, roots):
        return OUTSIDE
    matches = [path] if exists else map(Path, glob.iglob(str(path), recursive=True))
    for match in matches:
        if not _is_inside(match, roots):
            return OUTSIDE
        for link in _links_at(match):
            if not _is_inside(link, roots):
                return f"reads {link}, a link that leads {OUTSIDE}"
    return None


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    """Return whether a path, with all links resolved, is below one of the roots.

    Args:
        path: Any path, which need not exist.
        roots: Resolved folders.
    """
    real_path = Path(os.path.realpath(path))
    return any(real_path.is_relative_to(root) for root in roots)


def _before_wildcard(path: Path) -> Path:
    """Return the part of a glob in front of its first component with a wildcard.

    Raises:
        StopIteration: If the path has no wildcard.
    """
    n_fixed = next(i for i, part in enumerate(path.parts) if _MAGIC.search(part))
    return Path(*path.parts[:n_fixed])


def _links_at(path: Path) -> Iterator[Path]:
    """Yield the symbolic links that are followed when a file or a folder is read as data.

    Reading a file may also read other files of its folder, such as the index of a token file or the
    configuration of a tokenizer. Reading a folder reads everything below it, except hidden names.
    A link to a folder is yielded before the links inside that folder, so that the caller can stop.

    Args:
        path: File or folder.
    """
    if not path.is_dir():
        siblings = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
        yield from (file for file in siblings if file.is_symlink() and not file.is_dir())
        return
    folders = [path]
    entered = {os.path.realpath(path)}
    while folders:
        for folder, names, files in os.walk(folders.pop()):
            names[:] = [name for name in names if name[0] != "."]
            for name in (*names, *(name for name in files if name[0] != ".")):
                entry = Path(folder, name)
                if not entry.is_symlink():
                    continue
                yield entry
                real_path = os.path.realpath(entry)
                if entry.is_dir() and real_path not in entered:
                    entered.add(real_path)
                    folders.append(Path(real_path))

"""Paths of an untrusted run's config: they stay in this project, or beside that run.

The paths are judged once, before the run starts. Links count as what they lead to.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptrain.core import locations

OUTSIDE = "outside of this project"
_MAGIC = re.compile(r"[*?\[]")


def allowed_roots(run_dir: str | Path) -> list[Path]:
    """Return the folders from which a run in `run_dir` may name files without being trusted."""
    run = Path(run_dir).expanduser().resolve()
    project = locations.find_project() or Path.cwd()
    roots = (Path.cwd(), project, Path(locations.default_output_dir()), run.parent)
    return [root.resolve() for root in roots]


def find_outside(value: str, roots: Sequence[Path]) -> str | None:
    """Return what is wrong with a value that names, or reaches by a link, a file outside of roots.

    Args:
        value: Any string of a config. A string that is neither absolute, nor goes up, nor exists,
            nor is a glob with matches names no file.
        roots: Resolved folders, all of which may be read.

    Returns:
        None if the value names no file, or if all that it names lies in the roots.
    """
    path = Path(os.path.expanduser(value))
    is_glob = bool(_MAGIC.search(value))
    exists = "\0" not in value and os.path.lexists(path)
    if not (exists or is_glob or path.is_absolute() or ".." in path.parts):
        return None
    # Of a glob the folder before the first wildcard is judged first: it may be all of the disk.
    fixed = path if exists or not is_glob else _before_wildcard(path)
    if "\0" in value or not _is_inside(fixed, roots):
        return OUTSIDE
    named = [path] if exists else [Path(one) for one in glob.iglob(str(path), recursive=True)]
    for one in named:
        if not _is_inside(one, roots):
            return OUTSIDE
        for link in _links_at(one):
            if not _is_inside(link, roots):
                return f"reads {link}, a link that leads {OUTSIDE}"
    return None


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    real_path = Path(os.path.realpath(path))
    return any(real_path.is_relative_to(root) for root in roots)


def _before_wildcard(path: Path) -> Path:
    """Return the part of a glob in front of its first component with a wildcard."""
    n_fixed = next(i for i, part in enumerate(path.parts) if _MAGIC.search(part))
    return Path(*path.parts[:n_fixed])


def _links_at(path: Path) -> Iterator[Path]:
    """Yield the links that are followed when a file or a folder is read as data.

    A file is read with its companions in the same folder: the index of a token file, the
    configuration of a tokenizer. A folder is read with all below it but hidden names. The links in
    a folder that a link leads to are yielded after this link, so that the caller can stop there.
    """
    if not path.is_dir():
        siblings = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
        yield from (one for one in siblings if one.is_symlink() and not one.is_dir())
        return
    folders, entered = [path], {os.path.realpath(path)}
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

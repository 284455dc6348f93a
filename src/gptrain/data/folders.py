"""Files below a folder of the user's own data, with links followed.

People assemble a corpus with `ln -s /disk2/shard corpus/`, so a link counts as what it leads to.
A run folder is not walked here: it may be untrusted, and links in it are never followed.
"""

import os
import warnings
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple


class FoundFile(NamedTuple):
    """One file below a folder.

    Attributes:
        name: Path relative to the folder, with slashes.
        path: Path by which the file was reached, links included.
        real_path: Path of the same file without links.
    """

    name: str
    path: Path
    real_path: str


class SkippedPaths:
    """Paths that a walk has passed over, for one warning per reason."""

    def __init__(self) -> None:
        self.loops: list[str] = []
        self.dangling: list[str] = []
        self.closed: list[str] = []
        self.repeated: list[str] = []

    def warn(self) -> None:
        """Issue one warning for each reason for which paths were passed over."""
        reasons = {
            "links lead back to a folder around them and are not followed again": self.loops,
            "links lead nowhere and are left out": self.dangling,
            "folders cannot be read and are left out": self.closed,
            "paths lead by links to data that is there already, which is read once": self.repeated,
        }
        for reason, paths in reasons.items():
            if paths:
                shortest = min(paths, key=len)
                warnings.warn(f"{len(paths)} {reason}: for example {shortest}", stacklevel=3)


def walk_files(
    root: str | os.PathLike,
    skipped: SkippedPaths,
    without: Collection[str] = (),
    enter_once: bool = True,
) -> Iterator[FoundFile]:
    """Yield all files below a folder but hidden ones.

    Folders that are not links come first, so that a folder is known by its own name and not by the
    name of a link to it.

    Args:
        root: Folder to start from; it may be a link itself.
        skipped: Gets the paths that are passed over.
        without: Names of folders that are left out.
        enter_once: Enter a folder to which several links lead only once. False enters it under
            each of its names, except inside itself.

    Raises:
        OSError: If `root` itself cannot be read.
    """
    root_path = Path(root).resolve()
    folders = deque([(root_path, "", frozenset({str(root_path)}))])
    linked: deque[tuple[Path, str, frozenset[str]]] = deque()
    entered = {str(root_path)}
    while folders or linked:
        folder, prefix, around = (folders or linked).popleft()
        real_folder = os.path.realpath(folder)
        if prefix and enter_once:
            if real_folder in entered:
                skipped.repeated.append(str(folder))
                continue
            entered.add(real_folder)
        try:
            names = sorted(os.listdir(folder))
        except PermissionError:
            if not prefix:
                raise
            skipped.closed.append(str(folder))
            continue
        for name in names:
            path = folder / name
            if name.startswith("."):
                continue
            is_link = path.is_symlink()
            real_path = os.path.realpath(path) if is_link else os.path.join(real_folder, name)
            if os.path.isdir(path):
                if name in without:
                    continue
                if real_path in around:
                    skipped.loops.append(str(path))
                    continue
                entry = (path, f"{prefix}{name}/", around | {real_path})
                (linked if is_link else folders).append(entry)
            elif os.path.isfile(path):  # no pipe, which would block for ever
                yield FoundFile(prefix + name, path, real_path)
            elif is_link and not os.path.exists(path):
                skipped.dangling.append(f"{path} -> {os.readlink(path)}")

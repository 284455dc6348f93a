"""Search for all files below a folder of training data, which follows links.

Users assemble a corpus with `ln -s /disk2/shard corpus/`, so a link counts as its target. Run
folders are never walked by this module: a run folder may be untrusted, and links in a run folder
are not followed.
"""

import os
import warnings
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple


class FoundFile(NamedTuple):
    """One file that was found below a folder, with its path before and after links are resolved.

    Attributes:
        name: Path relative to the folder, with slashes.
        path: Path by which the file was reached, links included.
        real_path: Path of the same file without links.
    """

    name: str
    path: Path
    real_path: str


class SkippedPaths:
    """Paths that `walk_files` has skipped, grouped by reason, for a warning.

    Attributes:
        loops: Links to a folder that contains the link.
        dangling: Links whose target does not exist, as "<link> -> <target>".
        unreadable: Folders that cannot be read.
        repeated: Paths to a file or folder that was reached by another path before.
    """

    def __init__(self) -> None:
        self.loops: list[str] = []
        self.dangling: list[str] = []
        self.unreadable: list[str] = []
        self.repeated: list[str] = []

    def warn(self) -> None:
        """Issue one warning for each reason that has paths, with their number and one of them."""
        reasons = [  # paths, the reason for one path, the reason for several paths
            (
                self.loops,
                "link leads back to a folder that contains it and is skipped",
                "links lead back to a folder that contains them and are skipped",
            ),
            (
                self.dangling,
                "link has no target and is skipped",
                "links have no target and are skipped",
            ),
            (
                self.unreadable,
                "folder cannot be read and is skipped",
                "folders cannot be read and are skipped",
            ),
            (
                self.repeated,
                "path leads by links to data that another path names, which is read once",
                "paths lead by links to data that other paths name, which is read once",
            ),
        ]
        for paths, reason_of_one, reason_of_several in reasons:
            if paths:
                reason = reason_of_one if len(paths) == 1 else reason_of_several
                shortest = min(paths, key=len)
                warnings.warn(f"{len(paths)} {reason}: for example {shortest}", stacklevel=3)


def walk_files(
    root: str | os.PathLike,
    skipped: SkippedPaths,
    excluded: Collection[str] = (),
    enter_once: bool = True,
) -> Iterator[FoundFile]:
    """Yield all regular files below a folder, at any depth, except hidden ones.

    Files in hidden folders are left out, too. Links to files and folders are followed. Folders are
    entered before links to folders. A folder that a link leads to is therefore known by its own
    name if it is below the root, and not by the name of the link.

    Args:
        root: Folder to start from. It may be a link.
        skipped: Object to which the skipped paths are added.
        excluded: Names of folders that are not entered.
        enter_once: Whether a folder to which several paths lead is entered only once. False enters
            it by each of these paths, except by a link inside of the folder itself.

    Raises:
        OSError: If `root` cannot be read. A folder below it without permission is skipped instead.
    """
    root_path = Path(root).resolve()
    # Entries: (folder, its name below the root with a final slash, real paths of its ancestors and
    # of the folder itself).
    folders = deque([(root_path, "", frozenset({str(root_path)}))])
    linked: deque[tuple[Path, str, frozenset[str]]] = deque()
    entered = {str(root_path)}
    while folders or linked:
        folder, prefix, ancestors = (folders or linked).popleft()
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
            skipped.unreadable.append(str(folder))
            continue
        for name in names:
            path = folder / name
            if name.startswith("."):
                continue
            is_link = path.is_symlink()
            real_path = os.path.realpath(path) if is_link else os.path.join(real_folder, name)
            if os.path.isdir(path):
                if name in excluded:
                    continue
                if real_path in ancestors:
                    skipped.loops.append(str(path))
                    continue
                entry = (path, f"{prefix}{name}/", ancestors | {real_path})
                (linked if is_link else folders).append(entry)
            elif os.path.isfile(path):  # reading a named pipe could block for ever
                yield FoundFile(prefix + name, path, real_path)
            elif is_link and not os.path.exists(path):
                skipped.dangling.append(f"{path} -> {os.readlink(path)}")

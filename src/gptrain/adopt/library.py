"""Where a project's library comes from: a copy in it, or a requirement in its pyproject.toml."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from gptrain.core.errors import ConfigError
from gptrain.core.locations import LIBRARY

VENDORED = "vendored"
IN_PROJECT = "src/gptrain"
NEW, OLD = ".gptrain-new", ".gptrain-old"  # beside it during an upgrade
ADDRESS = r"(git\+)?https?://\S+|git\+ssh://\S+"
REQUIRED = r'"gptrain @ [^"]*"'  # in pyproject.toml


def requirement(library: str) -> str | None:
    """What pip is asked for, of a folder, a wheel or an address; None for a copy in the project.

    Raises: ConfigError.
    """
    path = Path(library).expanduser()
    if library == VENDORED:
        return None
    if re.fullmatch(ADDRESS, library):
        return f"gptrain @ {library}"
    if (path / "pyproject.toml").is_file() or (path.suffix == ".whl" and path.is_file()):
        return f"gptrain @ {path.resolve().as_uri()}"
    allowed = f"{VENDORED}, a folder of gptrain, a wheel of it, git+https://..."
    raise ConfigError.of("library", library, "no library is there", allowed=allowed)


def package_in(library: str, temporary: Path) -> Path:
    """The folder of the package: of the running one, of a checkout, of a wheel, unpacked there.

    Raises: ConfigError.
    """
    path = Path(library).expanduser()
    found = LIBRARY if library == VENDORED else path / IN_PROJECT
    if path.suffix == ".whl" and path.is_file():
        shutil.unpack_archive(path, temporary, "zip")
        found = temporary / "gptrain"
    if not (found / "conf" / "base.yaml").is_file():
        message = "no folder of gptrain and no wheel of it; an address is cloned first"
        raise ConfigError.of("library", library, message)
    return found


def restore(project: Path) -> None:
    """Move the package of a project back if an upgrade was killed between its two renames."""
    target = project / IN_PROJECT
    old = target.with_name(OLD)
    if old.is_dir() and not target.exists():
        old.rename(target)


def put(library: Path, project: Path) -> None:
    """Copies the package into a project, in place of the one that it has.

    Raises: ConfigError where that one is meant itself, or has changes that git would not bring
        back; OSError.
    """
    target = project / IN_PROJECT
    if target.exists():
        if library.resolve() == target.resolve():
            message = "this is the library that the project has"
            raise ConfigError.of("library", library, message, hint="library=<a newer checkout>")
        git = ["git", "-C", str(project), "status", "--porcelain", "--untracked-files=no"]
        done = subprocess.run([*git, "--", IN_PROJECT], capture_output=True, text=True)
        if done.stdout:
            message = "has changes that are not committed, which would be lost"
            raise ConfigError.of("", None, f"{target} {message}")
    new, old = target.with_name(NEW), target.with_name(OLD)
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
    # Its links to files of a checkout are copied as what they lead to.
    left = shutil.ignore_patterns("__pycache__", "local", ".*")
    shutil.copytree(library, new, ignore=left)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def require(project: Path, needed: str | None) -> None:
    """Writes another requirement into a project's pyproject.toml. Raises: ConfigError, OSError."""
    file = project / "pyproject.toml"
    text, n = re.subn(REQUIRED, f'"{needed}"', file.read_text(encoding="utf-8"))
    if needed is None or n != 1:
        message = "the project has no copy of the library, and requires none by an address"
        hint = "library=<a folder, a wheel, git+https://...>"
        raise ConfigError.of("library", needed or VENDORED, message, hint=hint)
    file.write_text(text, encoding="utf-8")

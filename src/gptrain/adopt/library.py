"""Install the library in a project: as a copy, or as a requirement in its pyproject.toml."""

import re
import shutil
import subprocess
from pathlib import Path

from gptrain.core.errors import ConfigError
from gptrain.core.locations import LIBRARY, expand_home

VENDORED = "vendored"
IN_PROJECT = "src/gptrain"
# Folders next to the library while an upgrade replaces it.
NEW = ".gptrain-new"
OLD = ".gptrain-old"
ADDRESS = r"(git\+)?https?://\S+|git\+ssh://\S+"
REQUIRED = r'"gptrain @ [^"]*"'  # pattern of the requirement in pyproject.toml


def requirement(library: str) -> str | None:
    """Return how a project requires the library in its pyproject.toml, or None for a copy in it.

    Args:
        library: "vendored", a folder with a checkout, a wheel, or an address that begins with
            `https://`, `git+https://` or `git+ssh://`.

    Returns:
        A requirement such as `gptrain @ git+https://…`, or None for "vendored".

    Raises:
        ConfigError: If `library` is none of these.
    """
    path = expand_home(library)
    if library == VENDORED:
        return None
    if re.fullmatch(ADDRESS, library):
        return f"gptrain @ {library}"
    if (path / "pyproject.toml").is_file() or (path.suffix == ".whl" and path.is_file()):
        return f"gptrain @ {path.resolve().as_uri()}"
    allowed = f"{VENDORED}, a folder of gptrain, a wheel of it, git+https://..."
    raise ConfigError.of("library", library, "not a library", allowed=allowed)


def package_in(library: str, temporary: Path) -> Path:
    """Return the folder of the package gptrain that the option `library` names.

    Args:
        library: "vendored" for the running package, a folder with a checkout, or a wheel.
        temporary: Folder into which a wheel is unpacked.

    Raises:
        ConfigError: If there is no such package.
        OSError: If the wheel cannot be unpacked.
    """
    path = expand_home(library)
    package = LIBRARY if library == VENDORED else path / IN_PROJECT
    if path.suffix == ".whl" and path.is_file():
        shutil.unpack_archive(path, temporary, "zip")
        package = temporary / "gptrain"
    if not (package / "conf" / "base.yaml").is_file():
        message = "neither a checkout nor a wheel of gptrain; clone an address first"
        raise ConfigError.of("library", library, message)
    return package


def restore(project: Path) -> None:
    """Undo an upgrade of the library in a project that was killed half-way.

    An upgrade (`copy_library`) renames `src/gptrain` to `src/.gptrain-old`, and then the new
    package to `src/gptrain`. If only the first was done, it is reversed. Does nothing in any other
    case.

    Args:
        project: Folder of the project.

    Raises:
        OSError: If the folder cannot be renamed.
    """
    target = project / IN_PROJECT
    old = target.with_name(OLD)
    if old.is_dir() and not target.exists():
        old.rename(target)


def copy_library(library: Path, project: Path) -> None:
    """Copy the package gptrain into a project, in place of the copy that the project has, if any.

    The new package is copied next to the old one, and the two are exchanged by two renames:
    `restore` repairs a project if the process is killed between them. Names that begin with a dot,
    `__pycache__` and `local` are left out. Files of the old copy that git does not track are lost;
    in a project without a git repository, so are all changes of the old copy.

    Args:
        library: Folder of the package.
        project: Folder of the project.

    Raises:
        ConfigError: If `library` is the project's own copy, or if files of that copy which git
            tracks have changes that are not committed.
        OSError: If a file cannot be read or written, or if git is not installed and the project has
            a copy.
    """
    target = project / IN_PROJECT
    if target.exists():
        if library.resolve() == target.resolve():
            message = "the project uses this copy already"
            raise ConfigError.of("library", library, message, hint="library=<a newer checkout>")
        git = ["git", "-C", str(project), "status", "--porcelain", "--untracked-files=no"]
        done = subprocess.run([*git, "--", IN_PROJECT], capture_output=True, text=True)
        if done.stdout:
            message = "has changes that are not committed, which would be lost"
            raise ConfigError.of("", None, f"{target} {message}")
    new, old = target.with_name(NEW), target.with_name(OLD)
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)  # left by an upgrade that was interrupted
    # Symbolic links to files of a checkout are copied as files.
    ignored = shutil.ignore_patterns("__pycache__", "local", ".*")
    shutil.copytree(library, new, ignore=ignored)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def check_paths(project: Path) -> list[str]:
    """Return an error line for each missing file of the library that a project names.

    Only the names of .txt files in pyproject.toml, README.md and .ci/run are checked. An older
    library may have had such a file at another path.

    Args:
        project: Folder of the project.
    """
    lines = []
    for name in ("pyproject.toml", "README.md", ".ci/run"):
        file = project / name
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        for path in re.findall(rf"{IN_PROJECT}/[\w/]+\.txt", text):
            if not (project / path).exists():
                hint = f"{IN_PROJECT}/adopt/files/{Path(path).name}"
                lines.append(f"{name}: error: {path}: no such file in the library; try: {hint}")
    return lines


def require(project: Path, needed: str | None) -> None:
    """Replace the requirement for the library in a project's pyproject.toml.

    Args:
        project: Folder of the project.
        needed: New requirement for pip, as `requirement` returns it: `gptrain @ ` and an address.
            None, which stands for a copy of the library in the project, is refused.

    Raises:
        ConfigError: If `needed` is None, or if the file does not contain exactly one requirement
            of the form "gptrain @ <address>". The file is then unchanged.
        OSError: If the file cannot be read or written.
    """
    file = project / "pyproject.toml"
    text, n = re.subn(REQUIRED, f'"{needed}"', file.read_text(encoding="utf-8"))
    if needed is None or n != 1:
        message = "the project neither contains the library nor requires it by an address"
        hint = "library=<a folder, a wheel, git+https://...>"
        raise ConfigError.of("library", needed or VENDORED, message, hint=hint)
    file.write_text(text, encoding="utf-8")

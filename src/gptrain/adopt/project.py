"""A new project: what is copied of an old one, and what is written for it."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from gptrain.adopt.library import IN_PROJECT
from gptrain.core.errors import ConfigError, ConfigIssue
from gptrain.core.locations import LIBRARY

TEMPLATE = LIBRARY / "adopt" / "template"  # laid out as a project
WRITTEN = {  # file of a project -> its text in files/
    "README.md": "README.md",
    "pyproject.toml": "project.toml",
    ".ci/run": "run",
    ".gitignore": "gitignore",
}
REQUIREMENTS = "requirements.txt"  # one's own, in a project that holds the library
BLOCK = r"(?s)(?<=```bash\n).*?(?=```)"
PRIVATE = {"__init__.py", "__pycache__"}
NAME = "my_project"  # in those texts
TEST = "tests/test_project.py"


def make(source: Path, to: Path, name: str, needed: str | None) -> list[Path]:
    """Writes a project but its library; the files that were copied, relative to source.

    Args:
        needed: what pip is asked for; None where the library is to lie in the project.

    Raises: ConfigError with all that is wrong with name and folder, OSError.
    """
    old = own_package(source)
    check(source, to, name, old)
    folders = [source / "conf", source / "src" / old]
    found = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    copied = [path.relative_to(source) for path in [source / "train.py", source / TEST, *found]]
    copied = [path for path in copied if path.parts[:2] != ("conf", "local")]
    copied = [path for path in copied if "__pycache__" not in path.parts]
    for path in copied:
        target = to / (Path("src", name, *path.parts[2:]) if path.parts[0] == "src" else path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target)
        if path.suffix in (".py", ".yaml"):
            target.write_text(renamed(target.read_text(), old, name))
    files = WRITTEN if needed else WRITTEN | {REQUIREMENTS: REQUIREMENTS}
    for file, text in files.items():
        target = to / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(written((LIBRARY / "adopt" / "files" / text).read_text(), name, needed))
    readme = to / "README.md"
    readme.write_text(named_there(readme.read_text(), to, name))
    if not needed and (source / REQUIREMENTS).is_file():
        shutil.copy2(source / REQUIREMENTS, to / REQUIREMENTS)
        copied.append(Path(REQUIREMENTS))
    (to / ".ci" / "run").chmod(0o755)
    return copied


def own_package(source: Path) -> str:
    """The package of a project that is not the library's. Raises: ConfigError."""
    found = [path.parent.name for path in (source / "src").glob("*/__init__.py")]
    own = sorted(set(found) - {Path(IN_PROJECT).name})
    if len(own) == 1:
        return own[0]
    raise ConfigError.of("", None, f"{source / 'src'}: one package of yours is needed, not {own}")


def check(source: Path, to: Path, name: str, old: str) -> None:
    """Raises: ConfigError, with all that is wrong with what was typed."""
    found = []
    is_taken = name != old and name.isidentifier() and importlib.util.find_spec(name)
    if not name.isidentifier() or keyword.iskeyword(name) or is_taken:
        message = "no name that Python imports, or that of a package that is there already"
        found.append(ConfigIssue("name", name, message, hint=NAME))
    if to.exists():
        found.append(ConfigIssue("--to", to, "is there already, and nothing is written over"))
    elif to.resolve().is_relative_to(source.resolve()):
        found.append(ConfigIssue("--to", to, "lies inside of this project", hint=f"../{NAME}"))
    if found:
        raise ConfigError(found)


def renamed(text: str, old: str, new: str) -> str:
    """A file of the project with its package's name where it is imported, built or shown."""
    text = re.sub(rf"(?m)^(\s*(?:from|import) ){old}\b", rf"\g<1>{new}", text)
    text = re.sub(rf"(_target_: *[\"']?){old}\.", rf"\g<1>{new}.", text)
    return re.sub(rf"\bsrc/{old}\b", f"src/{new}", text)


def written(text: str, name: str, needed: str | None) -> str:
    """A text of files/ for this project: of two ways to have the library the one that it has."""
    kept, gone = ("required", "vendored") if needed else ("vendored", "required")
    text = re.sub(rf"(?m)^.*<{gone}>.*\n", "", text)
    text = re.sub(rf"(?m) *(#|<!--)? *<{kept}>( *-->)?$", "", text)
    return text.replace("<needed>", needed or "").replace(NAME, name)


def named_there(readme: str, project: Path, name: str) -> str:
    """Return the README with the files that the project has, and only commands that find theirs."""
    package, conf = project / "src" / name, project / "conf"
    parts = [path for path in sorted(package.iterdir()) if path.name not in PRIVATE]
    folders = sorted({path.parent for path in conf.glob("*/*.yaml")})
    shown = {
        "<modules>": ", ".join(f"`{path.name}{'/' * path.is_dir()}`" for path in parts),
        "<choices>": ", ".join(f"`conf/{path.name}`" for path in folders),
    }
    for mark, names in shown.items():
        readme = readme.replace(mark, names)
    return re.sub(BLOCK, lambda block: _found_commands(block[0], conf), readme)


def _found_commands(block: str, conf: Path) -> str:
    """Return the lines of a block of commands whose choices are in conf/ or in the library's."""
    groups = {path.name for path in (LIBRARY / "conf").iterdir() if path.is_dir()}
    groups |= {path.name for path in conf.iterdir() if path.is_dir()}
    kept = []
    for line in block.splitlines(keepends=True):
        words = [word.partition("=") for word in line.partition("  #")[0].split()]
        named = [Path(group, f"{choice}.yaml") for group, _, choice in words if group in groups]
        if all((conf / path).is_file() or (LIBRARY / "conf" / path).is_file() for path in named):
            kept.append(line)
    return "".join(kept)


def left_behind(source: Path, copied: Iterable[Path], is_vendored: bool) -> list[str]:
    """Files that git does not track and that were not copied; none where git knows nothing."""
    command = ["git", "-C", str(source), "ls-files", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return []
    came, library = set(map(str, copied)), f"{IN_PROJECT}/"
    own = [path for path in done.stdout.split("\0") if path and path not in came]
    return [path for path in own if not (is_vendored and path.startswith(library))]

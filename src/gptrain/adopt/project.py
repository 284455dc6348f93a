"""Make a new project: copy the user's files of an old one and write the other files."""

import importlib.util
import keyword
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path

from gptrain.adopt.library import IN_PROJECT
from gptrain.core.errors import ConfigError, ConfigIssue
from gptrain.core.locations import LIBRARY

TEMPLATE = LIBRARY / "adopt" / "template"  # laid out as a project
WRITTEN = {  # file of a new project -> name of its template in files/
    "README.md": "README.md",
    "pyproject.toml": "project.toml",
    ".ci/run": "run",
    ".gitignore": "gitignore",
}
REQUIREMENTS = "requirements.txt"  # the user's own, in a project that contains the library
BLOCK = r"(?s)(?<=```bash\n).*?(?=```)"
PRIVATE = {"__init__.py", "__pycache__"}
NAME = "my_project"  # name of the project in the templates
TEST = "tests/test_project.py"
RECIPES = "recipes"  # package of the recipes, in src/ of the library's checkout and in TEMPLATE


def make(
    source: Path, to: Path, name: str, needed: str | None, recipes: Collection[str] = ()
) -> list[Path]:
    """Write a project without its library and return the copied files, relative to their project.

    Args:
        source: Folder of the project whose files are copied.
        to: Folder of the new project, which must not exist.
        name: Name of the new project's package.
        needed: Requirement for pip. None if the caller copies the library into the project.
        recipes: Names of the recipes to copy into the new project's package.

    Raises:
        ConfigError: If the name, the folder or a recipe cannot be used. Nothing was written then.
        OSError: If a file cannot be read or written. A part of the project may exist then.
    """
    old = own_package(source)
    check(source, to, name, old)
    folders = [source / "conf", source / "src" / old]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    if (source / TEST).is_file():
        files.insert(0, source / TEST)
    copied = [path.relative_to(source) for path in [source / "train.py", *files]]
    copied = [path for path in copied if path.parts[:2] != ("conf", "local")]
    copied = [path for path in copied if "__pycache__" not in path.parts]
    copied = [path for path in copied if not recipes_named_in(source / path)]
    origins = dict.fromkeys(copied, source)
    # A project that was made by this command has no recipes. Those of the library are copied.
    origin = source if (source / "src" / RECIPES).is_dir() else TEMPLATE
    for path in recipe_files(origin, recipes):
        if path in origins or (source / "src" / old / path.name).exists():
            message = f"the project already has a different file {path.name}"
            raise ConfigError.of(RECIPES, path.stem, message, hint="rename it")
        origins[path] = origin
    for path, folder in origins.items():
        target = to / (Path("src", name, *path.parts[2:]) if path.parts[0] == "src" else path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / path, target)
        if path.suffix in (".py", ".yaml"):
            text = rename_package(target.read_text(), RECIPES, name)
            target.write_text(rename_package(text, old, name))
    templates = WRITTEN if needed else WRITTEN | {REQUIREMENTS: "own_requirements.txt"}
    for file, template in templates.items():
        target = to / file
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (LIBRARY / "adopt" / "files" / template).read_text()
        target.write_text(fill_template(text, name, needed))
    readme = to / "README.md"
    readme.write_text(fill_readme(readme.read_text(), to, name))
    if not needed and (source / REQUIREMENTS).is_file():
        shutil.copy2(source / REQUIREMENTS, to / REQUIREMENTS)
        origins[Path(REQUIREMENTS)] = source
    (to / ".ci" / "run").chmod(0o755)
    return [*origins]


def recipe_files(origin: Path, recipes: Collection[str]) -> list[Path]:
    """Return the files of some recipes, relative to `origin`: code, test and yaml files.

    A yaml file belongs to the recipes whose classes it names. It is returned only if all of them
    are chosen. The list is empty without recipes.

    Args:
        origin: Folder with `src/recipes`.
        recipes: Names of the recipes.

    Raises:
        ConfigError: If there is no such recipe.
    """
    known = {path.stem for path in (origin / "src" / RECIPES).glob("*.py")} - {"__init__"}
    if unknown := sorted(set(recipes) - known):
        allowed = ", ".join(sorted(known))
        raise ConfigError.of(RECIPES, unknown[0], "no recipe of this name", allowed=allowed)
    if not recipes:
        return []
    code = [Path("src", RECIPES, f"{recipe}.py") for recipe in sorted(recipes)]
    tests = [Path("tests", RECIPES, f"test_{recipe}.py") for recipe in sorted(recipes)]
    choices = sorted((origin / "conf").glob("*/*.yaml"))
    chosen = [path for path in choices if set() < recipes_named_in(path) <= set(recipes)]
    return [*code, *tests, *(path.relative_to(origin) for path in chosen)]


def recipes_named_in(file: Path) -> set[str]:
    """Return the names of the recipes to whose classes a yaml file refers.

    The set is empty for a file of another kind.

    Args:
        file: Path of the file.
    """
    if file.suffix != ".yaml":
        return set()
    return set(re.findall(rf"\b{RECIPES}\.(\w+)\.", file.read_text()))


def own_package(source: Path) -> str:
    """Return the name of the user's package in a project.

    Args:
        source: Folder of the project.

    Raises:
        ConfigError: If `src` does not hold exactly one package other than the library and the
            recipes.
    """
    packages = {path.parent.name for path in (source / "src").glob("*/__init__.py")}
    own = sorted(packages - {Path(IN_PROJECT).name, RECIPES})
    if len(own) == 1:
        return own[0]
    raise ConfigError.of("", None, f"{source / 'src'}: must contain exactly one package, not {own}")


def check(source: Path, to: Path, name: str, old: str) -> None:
    """Check the name and the folder of a new project.

    Args:
        source: Folder of the project whose files are copied.
        to: Folder of the new project.
        name: Name of the new project's package.
        old: Name of the package in `source`.

    Raises:
        ConfigError: If the name cannot be imported or is that of an installed package, or the
            folder exists or lies inside `source`.
    """
    issues = []
    is_taken = name != old and name.isidentifier() and importlib.util.find_spec(name)
    if not name.isidentifier() or keyword.iskeyword(name) or is_taken:
        message = "not a name that Python can import, or the name of an installed package"
        issues.append(ConfigIssue("name", name, message, hint=NAME))
    if to.exists():
        issues.append(ConfigIssue("--to", to, "already exists, and nothing is overwritten"))
    elif to.resolve().is_relative_to(source.resolve()):
        issues.append(ConfigIssue("--to", to, "lies inside this project", hint=f"../{NAME}"))
    if issues:
        raise ConfigError(issues)


def rename_package(text: str, old: str, new: str) -> str:
    """Return the text of a file with the package renamed in imports, `_target_` nodes and paths.

    Args:
        text: Text of a Python or yaml file.
        old: Name of the package in the text.
        new: Name that replaces it.
    """
    text = re.sub(rf"(?m)^(\s*(?:from|import) ){old}\b", rf"\g<1>{new}", text)
    text = re.sub(rf"(_target_: *[\"']?){old}\.", rf"\g<1>{new}.", text)
    return re.sub(rf"\bsrc/{old}\b", f"src/{new}", text)


def fill_template(text: str, name: str, needed: str | None) -> str:
    """Return the text of a template in files/ for a new project: its name and library filled in.

    The word `my_project` becomes `name`, and `<needed>` becomes `needed`. A line with the mark
    `<vendored>` is kept only if the library is copied into the project, one with `<required>` only
    if it is a requirement for pip. The marks are removed.

    Args:
        text: Text of the template.
        name: Name of the project's package.
        needed: Requirement for pip. None if the library is copied into the project.
    """
    kept, dropped = ("required", "vendored") if needed else ("vendored", "required")
    text = re.sub(rf"(?m)^.*<{dropped}>.*\n", "", text)
    text = re.sub(rf"(?m) *(#|<!--)? *<{kept}>( *-->)?$", "", text)
    return text.replace("<needed>", needed or "").replace(NAME, name)


def fill_readme(readme: str, project: Path, name: str) -> str:
    """Return the README with the names of the project's files and without unusable commands.

    A command is unusable if it selects a choice that neither the project nor the library has.

    Args:
        readme: Text of the README.
        project: Folder of the new project, with its conf/ and its package.
        name: Name of the project's package.
    """
    package, conf = project / "src" / name, project / "conf"
    parts = [path for path in sorted(package.iterdir()) if path.name not in PRIVATE]
    folders = sorted({path.parent for path in conf.glob("*/*.yaml")})
    shown = {
        "<modules>": ", ".join(f"`{path.name}{'/' * path.is_dir()}`" for path in parts),
        "<choices>": ", ".join(f"`conf/{path.name}`" for path in folders),
    }
    for mark, names in shown.items():
        readme = readme.replace(mark, names)
    if not (project / TEST).is_file():
        readme = re.sub(rf"\| `{TEST}`.*\n", "", readme)
    return re.sub(BLOCK, lambda block: _found_commands(block[0], conf), readme)


def _found_commands(block: str, conf: Path) -> str:
    """Return the lines of a block of commands whose choices exist in conf/ or in the library.

    Args:
        block: Lines of a shell's code block.
        conf: The conf/ folder of the project.
    """
    groups = {path.name for path in (LIBRARY / "conf").iterdir() if path.is_dir()}
    groups |= {path.name for path in conf.iterdir() if path.is_dir()}
    kept = []
    for line in block.splitlines(keepends=True):
        words = [word.partition("=") for word in line.partition("  #")[0].split()]
        files = [Path(group, f"{choice}.yaml") for group, _, choice in words if group in groups]
        if all((conf / path).is_file() or (LIBRARY / "conf" / path).is_file() for path in files):
            kept.append(line)
    return "".join(kept)


def uncopied_files(source: Path, copied: Iterable[Path], is_vendored: bool) -> list[str]:
    """Return the files that git does not track and that were not copied.

    The paths are relative to `source`. Files that git ignores are left out. The list is empty if
    git is not installed or the project is no git repository.

    Args:
        source: Folder of the project from which files were copied.
        copied: Paths of the copied files, relative to `source`.
        is_vendored: Whether the new project contains the library itself. Files of the library are
            then left out, because they were copied with the library.
    """
    command = ["git", "-C", str(source), "ls-files", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # git is not installed
        return []
    copied_names = set(map(str, copied))
    library = f"{IN_PROJECT}/"
    own = [path for path in done.stdout.split("\0") if path and path not in copied_names]
    return [path for path in own if not (is_vendored and path.startswith(library))]

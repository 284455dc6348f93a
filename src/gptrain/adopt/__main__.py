"""The command `python -m gptrain.adopt`."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from gptrain import adopt as package
from gptrain.adopt.library import (
    IN_PROJECT,
    VENDORED,
    check_paths,
    copy_library,
    package_in,
    require,
    requirement,
    restore,
)
from gptrain.adopt.project import TEMPLATE, make, uncopied_files
from gptrain.config import vocabulary
from gptrain.config.check import check_config
from gptrain.config.compose import compose_and_explain, plain, resolved
from gptrain.config.values import walk
from gptrain.core import labels, shell
from gptrain.core.errors import BAD_CONFIG, DONE, ConfigError, ConfigIssue, ending_of
from gptrain.core.locations import LIBRARY, VARIABLE, enter, find_project
from gptrain.core.parser import Parser
from gptrain.runtime.streams import prepare_streams

OPTIONS = ("library=", "recipes=")
CHECK = ("-m", "gptrain.adopt", "--check")
MISSING = "???"  # Hydra's mark for a value that has to be typed
TO_BE_TYPED = "<to be typed>"  # placeholder for a missing value while the other values are checked
UNCHECKED = {"hydra", "hparams_search", "local"}  # groups that --check does not read


def main() -> NoReturn:
    """Run `python -m gptrain.adopt` with the words in `sys.argv`, and exit the process.

    The command makes a project, upgrades its library (`--upgrade`) or checks its conf/ (`--check`).
    The exit code is 0, that of the error, which is printed on stderr, or 2 if `--check` has found
    a mistake.
    """
    raw = argparse.RawDescriptionHelpFormatter
    head: dict[str, Any] = {"description": package.__doc__, "formatter_class": raw}
    parser = Parser("python -m gptrain.adopt", allow_abbrev=False, **head)
    parser.add_argument(
        "words", nargs="*", metavar="name", help="name of the package; library=... recipes=[...]"
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="folder of the project; a new one unless --upgrade or --check is given",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--upgrade", action="store_true", help="replace the library of a project")
    which.add_argument(
        "--check", action="store_true", help="print what this library refuses in conf/"
    )
    prepare_streams(is_run=False)
    try:
        code = answer(parser.parse_intermixed_args())
    except (ConfigError, OSError) as error:
        ending = ending_of(error)
        print(ending.line, file=sys.stderr)
        code = ending.code
    sys.exit(code)


def answer(args: argparse.Namespace) -> int:
    """Make, upgrade or check a project, and return the exit code of the command.

    Args:
        args: Parsed command line: `words` (name, library=..., recipes=...), `to`, `upgrade`,
            `check`.

    Raises:
        ConfigError: If the words do not fit together, there is no project, or the project cannot be
            made or upgraded.
        OSError: If a file cannot be read or written.
    """
    options = {"library": VENDORED, "recipes": ""}
    options |= dict(word.split("=", 1) for word in args.words if word.startswith(OPTIONS))
    names = [word for word in args.words if not word.startswith(OPTIONS)]
    library = options["library"]
    recipes = [word for word in re.split(r"[\[\],\s]+", options["recipes"]) if word]
    is_new = not (args.upgrade or args.check)
    if len(names) != (1 if is_new else 0):
        given = " ".join(names) or None
        message = "one name is needed" if is_new else "no name is needed"
        raise ConfigError.of("name", given, message, hint="python -m gptrain.adopt --help")
    if is_new:
        return adopt(names[0], args.to, library, recipes)
    if recipes:
        message = "only a new project gets recipes"
        raise ConfigError.of("recipes", options["recipes"], message, hint="copy the recipe's files")
    folder = args.to or find_project()
    if folder is None or not (folder / "conf").is_dir():
        raise ConfigError.of("--to", args.to, "no project here, a folder with train.py and conf/")
    return upgrade(folder, library) if args.upgrade else check(folder / "conf")


def adopt(name: str, to: Path | None, library: str, recipes: Sequence[str]) -> int:
    """Make a new project, print what was copied, and return the exit code.

    Args:
        name: Name of the project's package.
        to: Folder of the project, which must not exist. None is an error.
        library: "vendored" for a copy of the library in the project. Otherwise a folder with a
            checkout, a wheel or an address, which the project requires in its pyproject.toml.
        recipes: Names of the recipes to copy.

    Raises:
        ConfigError: If an argument cannot be used.
        OSError: If a file cannot be read or written.
    """
    if to is None:
        message = "needed: the folder in which the project is made"
        raise ConfigError.of("--to", None, message, hint="--to ../mine")
    needed = requirement(library)
    source = find_project() or TEMPLATE
    copied = make(source, to, name, needed, recipes)
    if needed is None:
        copy_library(LIBRARY, to)
    n_files = labels.count_text(len(copied), "file")
    print(f"copied    {n_files} to {to}; the library: {needed or IN_PROJECT}")
    for path in uncopied_files(source, copied, needed is None):
        print(f"left      {path}")
    print(f"next      {enter_folder(to)} && git init && .ci/run")
    return DONE


def upgrade(project: Path, library: str) -> int:
    """Replace the library of a project and print what the new library refuses in conf/.

    If the project only requires the library, its pyproject.toml is changed, and the commands that
    install and check the new library are printed. An earlier upgrade that was killed half-way is
    undone before.

    Args:
        project: Folder of the project.
        library: "vendored" for the running library, a folder with a checkout, a wheel or an
            address.

    Returns:
        The exit code: that of `--check` under the new library, or 0 if the library is only
        required.

    Raises:
        ConfigError: If the library cannot be used, or the project's copy has uncommitted changes.
        OSError: If a file cannot be read or written.
    """
    restore(project)
    if not (project / IN_PROJECT).is_dir():
        require(project, needed := requirement(library))
        check_it = f"pip install -e . && {shell.command('python', *CHECK)}"
        print(f"required  {needed}\nnext      {enter_folder(project)} && {check_it}")
        return DONE
    with tempfile.TemporaryDirectory() as temporary:
        copy_library(package_in(library, Path(temporary)), project)
    print(f"replaced  {IN_PROJECT}", flush=True)
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    environment["PYTHONPATH"] = str((project / IN_PROJECT).parent.resolve())
    return subprocess.run([sys.executable, *CHECK], cwd=project, env=environment).returncode


def enter_folder(folder: Path) -> str:
    """Return the shell command that changes to a folder, with the path quoted."""
    return shell.command("cd", shell.folder_argument(folder))


def check(conf: Path) -> int:
    """Check the yaml files of a project's conf/, and print what this library refuses in them.

    Left out are the groups that configure Hydra and its sweepers, and the files of conf/local. This
    process works in the project afterwards (see `locations.enter`).

    Args:
        conf: The conf/ folder of the project.

    Returns:
        The exit code: 0 if every choice fits the library, else 2.
    """
    enter(conf)
    files_of_lines: dict[str, str] = {}
    general: set[str] = set()
    files = [conf / "train.yaml", *sorted(conf.glob("*/*.yaml"))]
    for file in (file for file in files if file.parent.name not in UNCHECKED):
        words = [] if file.parent == conf else [f"{file.parent.name}={file.stem}"]
        problems = find_problems(words, general)
        if not words:
            general = {problem.line for problem in problems}  # every choice would repeat them
        if problems and words and fits_with_another(conf, words, problems, general):
            continue
        for problem in problems:
            files_of_lines.setdefault(problem.line, f"conf/{file.relative_to(conf)}")
    lines = check_paths(conf.parent)
    lines += [f"{file}: {line}" for line, file in files_of_lines.items()]
    print("\n".join(lines) or "conf/     every choice fits the library")
    return BAD_CONFIG if lines else DONE


def find_problems(words: Sequence[str], general: Collection[str] = ()) -> list[ConfigIssue]:
    """Return what the library refuses in the config that these overrides compose.

    A value that conf/ leaves to the command line, `???`, is not checked. Neither is
    `model.vocab_size=auto` if the tokenizer is left to the command line. A config that cannot be
    composed gives its problems or, for an unexpected exception, one issue with the message.

    Args:
        words: Overrides, such as the choice of one yaml file.
        general: Printed lines about train.yaml itself, which are left out.
    """
    try:
        cfg, problems = compose_and_explain(list(words))
        for key in [place for place, value in walk(plain(cfg)) if value == MISSING]:
            OmegaConf.update(cfg, key, TO_BE_TYPED)
        problems = problems or check_config(resolved(cfg)).errors
    except ConfigError as error:
        problems = error.problems
        unknown_size = f"{vocabulary.KEY}={vocabulary.AUTO}"
        if [f"{problem.key}={problem.value}" for problem in problems] == [unknown_size]:
            return find_problems([*words, f"{vocabulary.KEY}=256"], general)
    except Exception as error:  # train.yaml itself cannot be composed
        problems = [ConfigIssue("", None, " ".join(str(error).split()))]
    checked = (problem for problem in problems if TO_BE_TYPED not in str(problem))
    return [problem for problem in checked if problem.line not in general]


def fits_with_another(
    conf: Path, words: Sequence[str], problems: Sequence[ConfigIssue], general: Collection[str]
) -> bool:
    """Return whether the config is valid if other groups have another choice of the project.

    A net may be made for one dataset of the project, and not for the default one. Only choices of
    the groups that the problems name are tried.

    Args:
        conf: The conf/ folder of the project.
        words: Overrides that do not fit alone.
        problems: Problems of the overrides alone.
        general: Printed lines about train.yaml itself, which are ignored.
    """
    taken = {word.partition("=")[0] for word in words} | UNCHECKED | {"experiment"}
    named = {group for issue in problems for group in re.findall(r"\b(\w+)\.\w", issue.line)}
    for group in sorted(named - taken):
        for file in sorted((conf / group).glob("*.yaml")):
            more = [*words, f"{group}={file.stem}"]
            rest = find_problems(more, general)
            if not rest or fits_with_another(conf, more, rest, general):
                return True
    return False


if __name__ == "__main__":
    main()

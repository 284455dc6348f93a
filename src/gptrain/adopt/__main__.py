"""The command: what is copied, what is left out, what it is called."""

from __future__ import annotations

import importlib.util
import itertools
import keyword
import re
import subprocess
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import NoReturn

from gptrain import adopt as package
from gptrain.problems import ConfigError, Parser, Problem, code_of
from gptrain.small_files import read_yaml

ROOT, NAME = Path(__file__).parents[3], "gptrain"
STAYS = ("src/gptrain/adopt", "tests/house")
KNOWN = ("*.*", "LICENSE", ".ci", ".github", "conf", "src", "tests", "outputs/.gitkeep")
README_SECTION = r"\n## Take parts out\n.*?(?=\n## )"  # tells of this command
LINT = 'select = ["E"', 'ignore = ["E501"] # lines are longer by the name\nselect = ["E"'
TIDY = ("check --fix-only --select I", "format")  # a name has its place among the imports


def main() -> NoReturn:
    """The command line."""
    head = {"description": package.__doc__, "formatter_class": RawDescriptionHelpFormatter}
    parser, parts = Parser("python -m gptrain.adopt", **head), read_parts()
    parser.add_argument("name", help="of the package, in place of gptrain")
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER", help="a new one")
    parser.add_argument("--without", default="", metavar="PARTS", help=",".join(parts))
    try:
        args = parser.parse_args()
        without = [part for part in args.without.split(",") if part]
        check(args, without, parts)
        n_files = copy(args.to, args.name, {path for part in without for path in parts[part]})
    except (ConfigError, OSError) as error:
        ours = isinstance(error, ConfigError)
        print(error if ours else f"error: {error}", file=sys.stderr)
        sys.exit(error.code if ours else code_of(error))
    print(f"{'copied':9} {n_files} files to {args.to}")
    print(f'next      cd {args.to} && git init && pip install -e ".[dev]" && python -m pytest')
    sys.exit()


def check(args: Namespace, without: list[str], parts: dict[str, list[str]]) -> None:
    """Raises: ConfigError, with all that is wrong with what was typed."""
    found, name = [], args.name
    if not name.isidentifier() or keyword.iskeyword(name):
        found.append(Problem("name", name, "no name that Python imports", attempt="my_project"))
    elif importlib.util.find_spec(name):
        found.append(Problem("name", name, "a package of this name is there already"))
    if args.to.exists():
        found.append(Problem("--to", args.to, "is there already, and nothing is written over"))
    for part in without:
        if part not in parts:
            found.append(Problem("--without", part, "no such part", ", ".join(parts)))
    if found:
        raise ConfigError(found)


def read_parts() -> dict[str, list[str]]:
    """Part -> its files and folders, each name with braces as a shell expands it."""
    parts = read_yaml(Path(__file__).with_name("parts.yaml"))
    return {
        part: [path for name in names for path in expand(name)] for part, names in parts.items()
    }


def expand(name: str) -> list[str]:
    """What a shell makes of a name with braces."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", name)]
    return ["".join(words) for words in itertools.product(*pieces)]


def copy(to: Path, name: str, gone: set[str]) -> int:
    """Writes the renamed files that are not gone; returns how many. Raises: OSError."""
    files = [file for file in list_files() if not _is_below(file, {*STAYS, *gone})]
    for file in files:
        target, content = to / rename(file, name), (ROOT / file).read_bytes()
        if b"\0" not in content:  # a picture
            content = rename(content.decode(), name).encode()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod((ROOT / file).stat().st_mode)
    readme, project = to / "README.md", to / "pyproject.toml"
    readme.write_text(re.sub(README_SECTION, "", readme.read_text(), flags=re.DOTALL))
    project.write_text(project.read_text().replace(*LINT))
    for words in TIDY if importlib.util.find_spec("ruff") else ():
        subprocess.run(
            [sys.executable, "-m", "ruff", *words.split(), "-qn", "."], cwd=to, check=False
        )
    return len(files)


def list_files() -> list[str]:
    """What git tracks; without git what a project consists of."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\0"
        )
    except (OSError, subprocess.CalledProcessError):
        names = []
    found = [ROOT / name for name in names if name]
    if not found:
        above = [path for pattern in KNOWN for path in ROOT.glob(pattern)]
        found = [file for path in above for file in ([path] if path.is_file() else path.rglob("*"))]
    kept = (path.relative_to(ROOT) for path in found if path.is_file())
    return [str(path) for path in kept if not {"__pycache__", "local"} & set(path.parts)]


def rename(text: str, name: str) -> str:
    """The text of the project with that name."""
    return text.replace(NAME, name).replace(NAME.upper(), name.upper())


def _is_below(file: str, paths: set[str]) -> bool:
    return any(f"{file}/".startswith(f"{path}/") for path in paths)


if __name__ == "__main__":
    main()

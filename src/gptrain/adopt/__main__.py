"""The command: what is copied, what is left out, what it is called."""

from __future__ import annotations

import importlib.util
import keyword
import re
import subprocess
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from gptrain import adopt as package
from gptrain.problems import ConfigError, Parser, Problem, code_of
from gptrain.small_files import read_yaml

ROOT, NAME = Path(__file__).parents[3], "gptrain"
STAYS = ("src/gptrain/adopt", "tests/house")
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
        files = list_files(path for part in without for path in parts[part])
        copy(files, args.to, args.name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    except OSError as error:
        print(Problem("", None, str(error)).line, file=sys.stderr)
        sys.exit(code_of(error))
    print(f"copied    {len(files)} files to {args.to}")
    print(f'next      cd {args.to} && git init && pip install -e ".[dev]" && python -m pytest')
    sys.exit()


def read_parts() -> dict[str, list[str]]:
    """Part -> its files and folders."""
    return read_yaml(Path(__file__).with_name("parts.yaml"))


def check(args: Namespace, without: list[str], parts: dict[str, list[str]]) -> None:
    """Raises: ConfigError, with all that is wrong with what was typed."""
    found, name = [], args.name
    if not name.isidentifier() or keyword.iskeyword(name) or importlib.util.find_spec(name):
        wrong = "no name that Python imports, or that of a package that is there already"
        found.append(Problem("name", name, wrong, attempt="my_project"))
    if args.to.exists():
        found.append(Problem("--to", args.to, "is there already, and nothing is written over"))
    for part in set(without) - parts.keys():
        found.append(Problem("--without", part, "no such part", ", ".join(parts)))
    if found:
        raise ConfigError(found)


def list_files(gone: Iterable[str]) -> list[str]:
    """What git tracks of this project, without what stays here and what is gone.

    Raises: ConfigError where git lists nothing: of an installed package, or in another's folder.
    """
    without = [f":!{path}" for path in (*STAYS, *gone)]
    command = ["git", "ls-files", "-z", "--", ".", *without]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    files = [file for file in done.stdout.split("\0") if (ROOT / file).is_file()]
    if not files:
        wrong = f"{ROOT} is no clone whose files git lists {done.stderr}"
        raise ConfigError.of("", None, wrong.strip())
    return files


def copy(files: Iterable[str], to: Path, name: str) -> None:
    """Writes the files under the new name. Raises: OSError."""
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
        subprocess.run([sys.executable, "-m", "ruff", *words.split(), "-qn"], cwd=to, check=False)


def rename(text: str, name: str) -> str:
    """The text of the project with that name."""
    return text.replace(NAME, name).replace(NAME.upper(), name.upper())


if __name__ == "__main__":
    main()

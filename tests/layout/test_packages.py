"""Imports between packages go one way, and each framework is imported by few packages.

These are rules about this repository. A project that was made from the template may delete them.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gptrain"

# A package may import those before it.
ORDER = [
    "core", "conf", "__init__", "models", "optim", "loss", "data", "costs", "checkpoints",
    "runtime", "parallel", "text", "runs", "lit", "config", "assemble",
]  # fmt: skip
# Packages of a command may import any other package, as may `__main__.py` and `command.py` of any.
COMMANDS = {"export", "collectives", "generate", "plan", "command"}
FOREIGN = {  # framework -> packages that may import it
    "lightning": {"lit", "assemble"},
    "hydra": {"config", "assemble", "runtime"},
    "pydantic": {"config", "core", "checkpoints"},
}


@cache
def modules() -> list[Path]:
    """Return the Python files of the library."""
    return sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    if path.name in ("__main__.py", "command.py"):
        return "command"  # a command of any package: it is typed, and no other file imports it
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> set[str]:
    """Return the absolute names of all imports of a file, also of those inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_a_package_imports_only_packages_below_it():
    violations = []
    for path in modules():
        here = package_of(path)
        if here in COMMANDS:
            continue
        names = {name for name in imports(path) if name.startswith("gptrain.")}
        others = {name.split(".")[1] for name in names} - {here}
        above = others - {*ORDER[: ORDER.index(here)]}
        violations += [f"{path.relative_to(PACKAGE)} imports {name}" for name in above]
    assert not violations, "\n".join(violations)


def test_only_some_packages_import_a_framework():
    for package, allowed in FOREIGN.items():
        uses = [
            path for path in modules() if any(n.split(".")[0] == package for n in imports(path))
        ]
        assert set(map(package_of, uses)) - COMMANDS <= allowed, package


def test_private_names_of_lightning_stand_in_one_file():
    """lit/lightning.py has the reasons."""
    name = re.compile(r"\b(?:trainer|loop|fit_loop|epoch_loop|connector)\._[a-z]")
    of_lightning = [p for p in modules() if package_of(p) in ("lit", "assemble")]
    users = [path for path in of_lightning if name.search(path.read_text())]
    assert users == [PACKAGE / "lit" / "lightning.py"]


def count_code_lines(path: Path) -> int:
    """Count the lines of a file that are neither docstring nor comment nor blank."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    lines = (line.strip() for n, line in enumerate(text.splitlines(), 1) if n not in docstrings)
    return sum(bool(line) and not line.startswith("#") for line in lines)


def test_the_library_stays_small():
    lines = sum(map(count_code_lines, modules()))
    assert lines <= 9_616, f"{lines} lines of code in src/gptrain; only a new feature may add some"
    long = [path for path in modules() if count_code_lines(path) > 300]
    assert not long, long

"""The house is kept: imports go one way, and each room knows only what it is made of."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gptrain"

LEAVES = {"models", "data", "optim", "loss", "parallel", "plan", "resilience"}
# Room -> rooms of gptrain that it may import.
MAY_IMPORT = {
    **{leaf: set() for leaf in LEAVES},
    "parallel": {"loss"},  # over a vocabulary that is cut it is made of the same parts
    "lit": LEAVES - {"models"},
    "config": {"plan", "resilience", "data", "resume"},
    "resume": {"config", "resilience", "plan"},
    "weights": {"config", "resume", "parallel", "resilience"},
    "recipe": {"config", "optim", "parallel", "plan"},
    "build": {
        "config",
        "resume",
        "weights",
        "recipe",
        "lit",
        "data",
        "optim",
        "loss",
        "parallel",
        "plan",
        "resilience",
    },
    "launch": {"config", "resume", "recipe", "data", "parallel", "plan", "resilience"},
}
FRONT_VERBS = {"bench", "chaos", "export", "loading"}  # may import anything but each other
FOREIGN = {"lightning": {"lit", "build"}, "hydra": {"config", "build", "recipe", "launch"}}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Absolute names of all that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_the_rooms_below_it(path):
    here = room(path)
    if here in FRONT_VERBS or here == "__init__":
        return
    others = {name.split(".")[1] for name in imports(path) if name.startswith("gptrain.")}
    assert others - {here} <= MAY_IMPORT[here], f"{here} may not import this"


@pytest.mark.parametrize("package, allowed", FOREIGN.items())
def test_only_its_own_rooms_know_a_framework(package, allowed):
    knowing = {
        room(path) for path in modules() if package in {n.split(".")[0] for n in imports(path)}
    }
    assert knowing - FRONT_VERBS <= allowed


def test_the_model_is_plain_torch():
    for path in (PACKAGE / "models").rglob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def test_the_planner_needs_the_standard_library_only():
    for path in (PACKAGE / "plan").rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(path)} - {"gptrain"}
        assert roots <= sys.stdlib_module_names, path


def test_models_are_reached_by_target_only():
    for path in modules():
        if room(path) not in {"models", *FRONT_VERBS}:
            assert not any(name.startswith("gptrain.models") for name in imports(path)), path


def test_only_build_instantiates():
    users = {room(path) for path in modules() if re.search(r"\binstantiate\(", path.read_text())}
    assert users <= {"build", "recipe", *FRONT_VERBS}


def test_nothing_but_the_house_shows_at_the_top():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    shown = {name.split("/")[0] for name in tracked if not name.startswith(".")}
    house = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "conf",
        "src",
        "tests",
        "outputs",
        "train.py",
    }
    assert shown == house

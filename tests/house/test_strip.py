"""Parts come off, and others come on: in copies of this checkout, as gptrain.adopt makes them."""

from __future__ import annotations

import itertools
import re
import shutil

import pytest

from gptrain.adopt.__main__ import read_parts
from tests.house.copies import Copy
from tests.house.test_readme import README

PARTS = read_parts()
# Imports every module, collects every test, and asks for the strategies that are gone.
LOOK = """
import importlib, pkgutil, sys, pytest, gptrain
from tests.command_line import refused
assert gptrain.__file__.startswith(sys.argv[1]), gptrain.__file__
for module in pkgutil.walk_packages(gptrain.__path__, "gptrain."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in sys.argv[2:]:
    assert "unknown" in refused(f"strategy={name}")[0]
sys.exit(pytest.main(["--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]))
"""


@pytest.fixture(scope="module")
def one_copy(tmp_path_factory):
    copy = Copy(tmp_path_factory.mktemp("house"))
    yield copy
    copy.end()


@pytest.fixture
def copy(one_copy) -> Copy:
    one_copy.restore()
    return one_copy


def strip(copy: Copy, part: str) -> list[str]:
    """Deletes the files of a part, all of which are there; the strategies that are gone."""
    gone = [copy.folder / name for name in PARTS[part]]
    for path in gone:
        assert path.exists(), path
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [path.stem for path in gone if path.parent.name == "strategy"]


def look(copy: Copy, gone: list[str]) -> None:
    copy.python("-c", LOOK, str(copy.folder), *gone)


def expand(name: str) -> list[str]:
    """What a shell makes of a name with braces."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", name)]
    return ["".join(words) for words in itertools.product(*pieces)]


def test_the_readme_prints_the_table_of_parts():
    section = README.partition("## Take parts out")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (`[^|]+) \|$", section, re.MULTILINE)
    shown = {part: re.findall(r"`(\S+)`", files) for part, files in rows}
    assert {
        part: [path for one in names for path in expand(one)] for part, names in shown.items()
    } == PARTS
    assert expand("a/{b,c}/d_{e,f}") == ["a/b/d_e", "a/b/d_f", "a/c/d_e", "a/c/d_f"]


# Of the others, which nothing imports, tests/house/test_adopt.py takes all off at once.
@pytest.mark.parametrize("part", ["pipeline", "tensor_parallel", "export"])
def test_without_one_part_every_module_imports_and_every_test_is_collected(part, copy):
    look(copy, strip(copy, part))

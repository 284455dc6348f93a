"""Parts come off: what the README says to delete leaves a template that trains."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY
from tests.house.copies import copy_checkout, python

SECTION = (ROOT / "README.md").read_text().partition("## Take parts out")[2].partition("\n## ")[0]
ROWS = {
    what.strip(): re.findall(r"`(\S+/\S+)`", files)
    for what, files in re.findall(r"^\| ([^|]+) \| (`[^|]+) \|$", SECTION, re.MULTILINE)
}
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


def expand(pattern: str) -> list[str]:
    """What a shell makes of a name with braces."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    parts = [part if index % 2 else [",".join(part)] for index, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*parts)]


def strip(copy: Path, what: str) -> list[str]:
    """Deletes what a row names, all of which is there; the strategies that are gone."""
    gone = [copy / name for pattern in ROWS[what] for name in expand(pattern)]
    for path in gone:
        assert path.exists(), path
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [path.stem for path in gone if path.parent.name == "strategy"]


def look(copy: Path, gone: list[str]) -> None:
    found = python(copy, "-c", LOOK, str(copy), *gone)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]


def test_the_table_is_read():
    assert len(ROWS) == 4 and all(ROWS.values())
    assert expand("a/{b,c}/d_{e,f}") == ["a/b/d_e", "a/b/d_f", "a/c/d_e", "a/c/d_f"]


@pytest.mark.parametrize("what", ROWS)
def test_without_one_part_every_module_imports_and_every_test_is_collected(what, tmp_path):
    copy = copy_checkout(tmp_path / "copy")
    look(copy, strip(copy, what))


def test_without_all_of_them_it_still_trains(tmp_path):
    copy = copy_checkout(tmp_path / "copy")
    look(copy, [name for what in ROWS for name in strip(copy, what)])
    run = python(copy, "train.py", *TINY, "run_dir=outputs/a")
    assert run.returncode == 0, run.stderr
    assert (copy / "outputs" / "a" / "result.json").exists()

"""What files of this repository look like; a project made from it may write its own otherwise."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.test_choices import CONFS

FOUND = sorted(path for conf in CONFS for path in conf.glob("*/*.yaml"))
YAML = [path for path in FOUND if path.parent.name != "local"]


@pytest.mark.parametrize("path", YAML, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_choice_says_what_it_is(path):
    lines = path.read_text().splitlines()
    assert lines[lines[0] == "# @package _global_"].startswith("# ")


def test_an_experiment_is_a_diff_of_at_most_twenty_lines():
    for path in (ROOT / "conf" / "experiment").glob("*.yaml"):
        lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
        assert len(lines) <= 20, path


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170

"""What files of this repository look like; a project made from it may write its own otherwise."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.layout.test_packages import count_code_lines
from tests.test_choices import CONFS

FOUND = sorted(path for conf in CONFS for path in conf.glob("*/*.yaml"))
YAML = [path for path in FOUND if path.parent.name != "local"]


@pytest.mark.parametrize("path", YAML, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_choice_says_what_it_is(path):
    lines = path.read_text().splitlines()
    assert lines[lines[0] == "# @package _global_"].startswith("# ")


def test_an_experiment_is_a_short_diff():
    for path in (ROOT / "conf" / "experiment").glob("*.yaml"):
        lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
        assert len(lines) <= (30 if "recipes." in path.read_text() else 20), path


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


RECIPES = sorted(path for path in (ROOT / "src" / "recipes").glob("[!_]*.py"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_has_a_choice_or_command_a_test_and_its_size_in_the_readme(recipe):
    n_lines = count_code_lines(recipe)
    assert n_lines <= 135
    yaml = [path for path in FOUND if f"recipes.{recipe.stem}." in path.read_text()]
    is_command = "__main__" in recipe.read_text()
    assert is_command or recipe.stem in [path.stem for path in yaml]
    assert (ROOT / "tests" / "recipes" / f"test_{recipe.stem}.py").is_file()
    readme = (ROOT / "src" / "recipes" / "README.md").read_text()
    assert f"## {recipe.stem}\n" in readme
    assert re.search(rf"^\| `{recipe.stem}\.py` .*\| {n_lines} \|$", readme, re.MULTILINE), n_lines


def test_the_recipes_stay_few():
    assert sum(map(count_code_lines, RECIPES)) <= 630

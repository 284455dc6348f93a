"""The pinned versions in .ci/constraints.txt satisfy the requirements in pyproject.toml."""

from __future__ import annotations

from itertools import product

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def asked() -> list[Requirement]:
    """Return the requirements of pyproject.toml, those of all extras, too."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    requirements = map(Requirement, [*project["dependencies"], *extras])
    return [r for r in requirements if r.name != "gptrain"]  # an extra made of others


def test_every_requirement_is_pinned_within_its_range_on_every_python():
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    pins = [Requirement(text) for text in texts if text]
    violations = []
    for requirement, python in product(asked(), PYTHONS):
        where = {"python_full_version": f"{python}.0", "python_version": python}
        found = [
            str(pin.specifier)
            for pin in pins
            if pin.name == canonicalize_name(requirement.name)
            and (pin.marker is None or pin.marker.evaluate(where))
        ]
        is_pinned = len(found) == 1 and found[0].startswith("==")
        if not is_pinned or not requirement.specifier.contains(found[0][2:]):
            violations.append(f"{requirement} on {python}: pinned as {found}")
    assert not violations, violations

"""The pinned versions in .ci/constraints.txt satisfy the requirements in pyproject.toml."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def lines(*names: str) -> list[str]:
    """Return the lines of files of this checkout without comments and empty lines."""
    texts = (text for name in names for text in (ROOT / name).read_text().splitlines())
    return [line for text in texts if (line := text.partition("#")[0].strip())]


def asked() -> list[Requirement]:
    """Return the requirements of pyproject.toml, those of all extras, too."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    requirements = [Requirement(text) for text in [*project["dependencies"], *extras]]
    return [
        requirement for requirement in requirements if requirement.name != "gptrain"
    ]  # an extra made of others


def test_every_requirement_is_pinned_within_its_range_on_every_python():
    pins = [Requirement(line) for line in lines(".ci/constraints.txt")]
    violations = []
    for requirement in asked():
        for python in PYTHONS:
            where = {"python_full_version": f"{python}.0", "python_version": python}
            matching_pins = [pin for pin in pins if canonicalize_name(requirement.name) == pin.name]
            matching_pins = [
                pin for pin in matching_pins if pin.marker is None or pin.marker.evaluate(where)
            ]
            versions = [pin.specifier for pin in matching_pins]
            if [str(version)[:2] for version in versions] != ["=="]:
                violations.append(f"{requirement} on {python}: {[*map(str, matching_pins)]}")
            elif not requirement.specifier.contains(str(versions[0])[2:]):
                violations.append(f"{requirement} on {python}: pinned as {versions[0]}")
    assert not violations, violations

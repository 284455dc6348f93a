"""A plugin of pytest that tells coverage.py which test runs, also in the processes of the test."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Generator

import pytest
from coverage import Coverage

seconds: dict[str, float] = defaultdict(float)  # of each test, and of all tests of each file


def note(name: str) -> None:
    """Let coverage.py note all lines that run from now on under this name.

    A process that the test forks takes over the configuration, and one that it starts reads it.
    """
    coverage = Coverage.current()
    assert coverage is not None, "start pytest with `coverage run`"
    coverage.switch_context(name)
    coverage.config.context = name
    os.environ["COVERAGE_PROCESS_CONFIG"] = coverage.config.serialize()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> Generator[None, object, object]:
    """Note the lines of a fixture under the test, or under the file if its tests share it."""
    note(request.node.nodeid)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Function) -> None:
    """Note the lines of a test, under the file if it may keep something for other tests."""
    fixtures = [fixtures[-1] for fixtures in item._fixtureinfo.name2fixturedefs.values()]
    is_shared = any(fixture.baseid and fixture.scope != "function" for fixture in fixtures)
    note(item.nodeid.partition("::")[0] if is_shared else item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds of a test. A test that fails says nothing about mutants."""
    for name in (report.nodeid, report.nodeid.partition("::")[0]):
        seconds[name] += math.inf if report.failed else report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds next to the records of coverage.py."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        path = session.config.rootpath / "outputs" / "coverage" / "seconds.json"
        path.write_text(json.dumps(seconds))

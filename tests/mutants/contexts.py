"""A plugin of pytest and of coverage.py, by which the latter knows the name of the current test.

Processes that a test starts or forks, also from a server that an earlier test has started, read the
name of the test from a file.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coverage import Coverage, CoveragePlugin

if TYPE_CHECKING:
    import pytest

FILE_KEY = "GPTRAIN_TEST_NAME_FILE"
seconds: dict[str, float] = defaultdict(float)  # name of a test or a file -> its time


class Context(CoveragePlugin):
    """Let a new process note its lines under the name of the test that runs."""

    def configure(self, config: Any) -> None:
        """Read the name of the test."""
        path = Path(os.environ.get(FILE_KEY, ""))
        config.set_option("run:context", path.read_text() if path.is_file() else None)


def coverage_init(reg: Any, options: object) -> None:
    """Register the plugin of coverage.py."""
    reg.add_configurer(Context())


def note(name: str) -> None:
    """Let coverage.py note all lines that run from now on under this name."""
    coverage = Coverage.current()
    assert coverage is not None, "start pytest with `coverage run`"
    coverage.switch_context(name)
    Path(os.environ[FILE_KEY]).write_text(name)


def pytest_configure(config: pytest.Config) -> None:
    """Choose a file for the name of the test, one for each worker."""
    os.environ[FILE_KEY] = str(config.rootpath / "outputs" / "coverage" / f"name-{os.getpid()}")


def pytest_fixture_setup(request: pytest.FixtureRequest) -> None:
    """Note the lines of a fixture under the test, or under the file if its tests share it."""
    note(request.node.nodeid)


def pytest_runtest_call(item: pytest.Item) -> None:
    """Note the lines of a test."""
    note(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds of a test. A test that fails says nothing about mutants."""
    for name in (report.nodeid, report.nodeid.partition("::")[0]):
        seconds[name] += math.inf if report.failed else report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds next to the records of coverage.py."""
    if not hasattr(session.config, "workerinput"):  # the process that starts the workers has all
        path = session.config.rootpath / "outputs" / "coverage" / "seconds.json"
        path.write_text(json.dumps(seconds))

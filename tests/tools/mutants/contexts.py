"""A plugin of pytest and of coverage.py, by which the latter knows the name of the current test.

Processes that a test starts or forks, also from a server that an earlier test has started, read the
name of the test from a file.
"""

import json
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

from coverage import Coverage, CoveragePlugin

FILE_KEY = "GPTRAIN_TEST_NAME_FILE"
seconds = defaultdict[str, float](float)  # name of a test -> its time


class Context(CoveragePlugin):
    """Let a new process note its lines under the name of the test that runs."""

    def configure(self, config: Any) -> None:
        """Read the name of the test."""
        path = Path(os.environ.get(FILE_KEY, ""))
        config.set_option("run:context", path.read_text() if path.is_file() else None)


def coverage_init(reg: Any, options: object) -> None:
    """Register the plugin of coverage.py."""
    reg.add_configurer(Context())


def pytest_runtest_logstart(nodeid: str) -> None:
    """Let coverage.py note all lines that run from now on under the name of this test."""
    cast(Coverage, Coverage.current()).switch_context(nodeid)
    path = Path(f"outputs/coverage/name-{os.getpid()}").absolute()
    path.write_text(nodeid)
    os.environ[FILE_KEY] = str(path)


def pytest_runtest_logreport(report: Any) -> None:
    """Add up the seconds of a test. A test that fails says nothing about mutants."""
    seconds[report.nodeid] += math.inf if report.failed else report.duration


def pytest_sessionfinish() -> None:
    """Write the seconds. The process that has started the workers has all, and is the last one."""
    passed = {test: time for test, time in seconds.items() if time < math.inf}
    Path("outputs/coverage/seconds.json").write_text(json.dumps(passed))

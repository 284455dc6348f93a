"""One thread, a fixed seed, and a folder of its own for all that a run writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _fixed_seed():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _own_output(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GPTRAIN_OUTPUT_DIR", str(tmp_path_factory.mktemp("outputs")))


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess]:
    """Runs `python <arguments>` as a user would, from any folder; the output is text."""

    def run(*arguments: str, timeout_s: float = 120, **options) -> subprocess.CompletedProcess:
        options = {"cwd": ROOT, **options}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **options,
        )

    return run

"""Types the commands of these tests. In a project that has a recipe, ranks start as a user's do."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

try:
    from tests.forked import forked_ranks
except ImportError:  # a project that was made from this template

    def forked_ranks(*_: Path) -> nullcontext:
        return nullcontext()


PROJECT = next(path for path in Path(__file__).parents if (path / "train.py").is_file())


@pytest.fixture
def run(monkeypatch, tmp_path, capfd) -> Callable[..., str]:
    """Return a function that does what a command line does, and returns what it prints."""

    def call(main: Callable[[], object], *words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with (
            pytest.raises(SystemExit) as left,
            forked_ranks(tmp_path / "ranks.out", tmp_path / "ranks.err"),
        ):
            main()
        printed = capfd.readouterr()
        assert (left.value.code or 0) == code, printed
        return printed.out if code == 0 else printed.err

    return call


@pytest.fixture
def train(run) -> Callable[..., str]:
    """Return a function that runs train.py."""
    return partial(run, partial(runpy.run_path, str(PROJECT / "train.py"), run_name="__main__"))

"""Forks the ranks of these tests. In a project that has a recipe, they start as a user's do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import forked_ranks


@pytest.fixture(autouse=True)
def fork_ranks(tmp_path: Path) -> Iterator[None]:
    """Fork the ranks of the test, which append their output to two files."""
    with forked_ranks(tmp_path / "ranks.out", tmp_path / "ranks.err"):
        yield

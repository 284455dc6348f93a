"""Helpers that check a command line in this process, without writing files."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

from gptrain.config.check import check_config
from gptrain.config.cli import compose_command, run_command
from gptrain.config.compose import resolved
from gptrain.core.schema import RunConfig


def answer(*words: str) -> tuple[int, list[str]]:
    """Exit code and lines of `python train.py <words>`, whose job does nothing."""
    said = io.StringIO()
    with redirect_stderr(said):
        code = run_command(lambda cfg: None, list(words))
    return code, said.getvalue().splitlines()


def refused(*words: str, code: int = 2) -> list[str]:
    """The lines that refuse a command, each of one problem."""
    found, lines = answer(*words)
    assert found == code and lines, (found, lines)
    for line in lines:
        assert line.startswith(("error: ", "warning: ")) and line.isprintable(), line
    return [line for line in lines if line.startswith("error: ")]


def accepted(*words: str) -> list[str]:
    """The warnings of a command that may run."""
    found, lines = answer(*words)
    assert found == 0, lines
    return lines


def compose_run(*words: str) -> RunConfig:
    """Return the typed config of a command line that is valid by itself."""
    checked = check_config(resolved(compose_command(list(words))))
    assert not checked.errors, checked.errors
    return checked.run

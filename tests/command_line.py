"""Helpers that check a command line in this process, without writing files."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

from omegaconf import DictConfig

from gptrain.config.checks import check_rules
from gptrain.config.cli import run_command
from gptrain.config.compose import compose_words, plain, typed
from gptrain.config.from_run import expand
from gptrain.core.schema import RunConfig
from gptrain.runtime.signals import StopFlag
from gptrain.runtime.watchdog import Guard


def unwatched(rank: int = 0) -> Guard:
    """Return a guard for a run that a test builds by itself. It watches nothing until entered."""
    return Guard(StopFlag(), rank, timeout_s=60.0, report=print)


def answer(*words: str) -> tuple[int, list[str]]:
    """Run `python train.py <words>` with a job that does nothing.

    Returns:
        The exit code, and the lines on stderr.
    """
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        code = run_command(lambda cfg: None, list(words))
    return code, stderr.getvalue().splitlines()


def refused(*words: str, code: int = 2) -> list[str]:
    """Check that a command is refused with this exit code, and return its error lines."""
    exit_code, lines = answer(*words)
    assert exit_code == code and lines, (exit_code, lines)
    for line in lines:
        assert line.startswith("error: ") and line.isprintable(), line
    return lines


def compose_command(words: list[str]) -> DictConfig:
    """Compose the config of words, also with `from_run`, without checks, or raise a ConfigError."""
    return compose_words(expand(words))


def compose_run(*words: str) -> RunConfig:
    """Return the typed config of a command line that is valid by itself."""
    run = typed(plain(compose_command(list(words))), RunConfig)
    assert not [*check_rules(run)], words
    return run

"""What a command line is answered, in this process: exit code and lines, nothing written."""

from __future__ import annotations

from functools import cache

from gptrain.config.compose import Composer
from gptrain.config.examine import Answer, composer_of, examine, parse_command
from gptrain.config.schema import register
from gptrain.problems import ConfigError


@cache
def composer() -> Composer:
    """One for all tests: it keeps what was composed."""
    register()
    return Composer(many=True)


def answer(*words: str) -> Answer:
    """The answer to `python train.py <words>`, before anything would start."""
    composer()
    try:
        args = parse_command(list(words))
        special = args.config_dir or args.config_name or args.config_path
        return examine(args, composer_of(args) if special else composer())
    except ConfigError as error:
        return Answer(list(words), error.problems, code=error.code)


def refused(*words: str, code: int = 2) -> list[str]:
    """The lines that refuse a command, each of one problem."""
    found = answer(*words)
    assert found.code == code, found.lines
    assert found.lines
    for line in found.lines:
        assert line.startswith(("error: ", "warning: ")), line
        assert "\n" not in line and line.isprintable()
    return [line for line in found.lines if line.startswith("error: ")]


def accepted(*words: str) -> list[str]:
    """The warnings of a command that may run."""
    found = answer(*words)
    assert found.code == 0, found.lines
    return found.lines

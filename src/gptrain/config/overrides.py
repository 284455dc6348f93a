"""Parses Hydra overrides, and explains in one line each those that Hydra refuses."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from gptrain.config.values import unknown_choice, unknown_key, walk
from gptrain.core.errors import ConfigIssue, first_line
from gptrain.core.shell import command, quoted

# Exceptions that Hydra raises for an override that it cannot parse or compose. Hydra does not wrap
# all of them in a HydraException.
REFUSALS = (
    HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, KeyError,
    AttributeError, OSError, RecursionError, AssertionError,
)  # fmt: skip


def parse(overrides: list[str]) -> tuple[list[Override], list[ConfigIssue]]:
    """Parse overrides, which may be those of a sweep.

    Args:
        overrides: Words of a command line, such as `trainer.max_steps=10`.

    Returns:
        The overrides that Hydra can parse, and a problem for each word that Hydra cannot parse.
    """
    parsed, problems = [], []
    for line in overrides:
        key, equals, value = line.partition("=")
        with suppress(*REFUSALS):
            (override,) = OverridesParser.create().parse_overrides([line])
            if override.key_or_group:
                parsed.append(override)
                continue
        if equals and key.strip("+~ "):
            hint = command(f"{key}={quoted(value)}")
            problems.append(ConfigIssue(key.lstrip("+~"), value, "cannot be parsed", hint=hint))
        else:
            problems.append(ConfigIssue("", None, f"{line}: not key=value", hint="--help"))
    return parsed, problems


def line_of(override: Override) -> str:
    """Return the text from which an override was parsed, such as `+trainer.max_steps=10`.

    The text is empty if the override was not parsed from a text.
    """
    return override.input_line or ""


def explain(
    override: Override,
    error: Exception,
    values: dict[str, Any],
    choices: Callable[[str], list[str]],
) -> ConfigIssue:
    """Return the problem of an override that Hydra refused, with the name that was meant, if any.

    This name is the most similar choice of a config group, or the most similar known key.

    Args:
        override: Override that Hydra refused.
        error: Exception that Hydra raised for it.
        values: Config without the override, as nested dicts.
        choices: Function that returns the choices of a config group, empty for any other key.
    """
    key, value = override.key_or_group, line_of(override).partition("=")[2] or None
    if override.is_sweep_override():
        hint = f"-m for a sweep, or {command(f'{key}=[{value}]')} for a list"
        return ConfigIssue(key, value, "several values, but this is not a sweep", hint=hint)
    group = key.removesuffix(".name")  # strategy.name=X gets the same answer as strategy=X
    if names := choices(group):
        if not isinstance(error, MissingConfigException) and group == key:
            message = f"cannot be composed: {first_line(error)}"
            return ConfigIssue(key, value, message, ", ".join(names))
        return unknown_choice(key, str(value), names, group)
    if key in dict(walk(values)) or key.startswith("hydra."):
        return ConfigIssue(key, value, first_line(error.__cause__ or error))
    return unknown_key(key, value, values)

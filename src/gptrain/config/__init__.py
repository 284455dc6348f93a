"""The front of every command: composes a run's config, and answers wrong input in one line."""

from gptrain.config.cli import check, compose_command, main
from gptrain.problems import ConfigError, Problem

__all__ = ["ConfigError", "Problem", "check", "compose_command", "main"]

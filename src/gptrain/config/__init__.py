"""Composes and checks the config of every command, and reports wrong input in one line each.

`main` runs a command, `compose_command` composes a config, `check` checks one.
"""

from gptrain.config.cli import check, compose_command, main
from gptrain.core.errors import ConfigError, ConfigIssue

__all__ = ["ConfigError", "ConfigIssue", "check", "compose_command", "main"]

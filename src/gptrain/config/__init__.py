"""Composes and checks the config of every command, and reports wrong input in one line each.

`main` runs a command, and `compose_command` composes a config.
"""

from gptrain.config.cli import compose_command, main
from gptrain.core.errors import ConfigError, ConfigIssue

__all__ = ["ConfigError", "ConfigIssue", "compose_command", "main"]

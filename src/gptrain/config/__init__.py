"""Composes and checks the config of every command, and reports wrong input in one line each.

`main` runs a command, and `compose_command` composes a config.
"""

from gptrain.config.cli import main
from gptrain.config.from_run import compose_command
from gptrain.core.errors import ConfigError, ConfigIssue

__all__ = ["ConfigError", "ConfigIssue", "compose_command", "main"]

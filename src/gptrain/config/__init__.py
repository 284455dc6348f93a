"""Composes and checks the config of every command, and reports wrong input in one line each.

`main` runs a command.
"""

from gptrain.config.cli import main
from gptrain.core.errors import ConfigError, ConfigIssue

__all__ = ["ConfigError", "ConfigIssue", "main"]

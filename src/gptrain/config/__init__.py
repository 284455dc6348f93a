"""Composes and checks the config of every command, and reports wrong input in one line each.

`main` runs a command, `compose_command` composes a config, `check` checks one.
"""

import sys

from gptrain.core.errors import INTERRUPTED, ConfigError, ConfigIssue

try:
    from gptrain.config.cli import check, compose_command, main
except KeyboardInterrupt:  # the imports take half a second, and no other handler exists yet
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)

__all__ = ["ConfigError", "ConfigIssue", "check", "compose_command", "main"]

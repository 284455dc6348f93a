"""The front of every command: composes a run's config, and answers wrong input in one line."""

import sys

from gptrain.core.errors import INTERRUPTED, ConfigError, ConfigIssue

try:
    from gptrain.config.cli import check, compose_command, main
except KeyboardInterrupt:  # half a second of imports, before there is anybody to answer
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)

__all__ = ["ConfigError", "ConfigIssue", "check", "compose_command", "main"]

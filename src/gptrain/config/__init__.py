"""Composes and checks the config of every command, and reports wrong input in one line each.

`main` runs a command.
"""

from gptrain.config.cli import main

__all__ = ["main"]

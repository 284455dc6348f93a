"""The front door: composes a run's config, and answers every wrong input in one line."""

from gptrain.config.checks import check
from gptrain.config.cli import main
from gptrain.config.schema import register
from gptrain.launch.process import Process, this_process
from gptrain.problems import ConfigError, Problem

__all__ = ["ConfigError", "Problem", "Process", "check", "main", "register", "this_process"]

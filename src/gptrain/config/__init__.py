"""The front door: composes a run's config, and answers every wrong input in one line."""

from gptrain.config.checks import check
from gptrain.config.front import main
from gptrain.config.problems import ConfigError, Problem
from gptrain.config.process import Process, this_process
from gptrain.config.schema import register

__all__ = ["ConfigError", "Problem", "Process", "check", "main", "register", "this_process"]

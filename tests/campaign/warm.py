"""Imports what runs import, and composes one config: paid once, in the process that runs fork."""

import gc

import train  # noqa: F401
from gptrain.config.cli import compose_command

compose_command([])
gc.collect()
gc.freeze()  # collections in the forks leave shared pages shared

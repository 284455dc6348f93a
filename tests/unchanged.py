"""Restores what a command changes in its process, so that another command can follow in it."""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from hydra.core.hydra_config import HydraConfig

# Module -> pairs of functions that read and write a setting or the state of a random generator
SETTINGS = {
    "random": (("getstate", "setstate"),),
    "numpy.random": (("get_state", "set_state"),),
    "torch": (
        ("get_rng_state", "set_rng_state"), ("get_default_dtype", "set_default_dtype"),
        ("get_num_threads", "set_num_threads"),
        ("get_float32_matmul_precision", "set_float32_matmul_precision"),
        ("are_deterministic_algorithms_enabled", "use_deterministic_algorithms"),
    ),
}  # fmt: skip


@contextmanager
def unchanged_process() -> Generator[None, None, None]:
    """Restore the state of this process after the block, except for the modules it has imported.

    The state is the loggers, the warnings, the standard streams, the environment, the import path,
    the signal handlers (in the main thread only), Hydra's config, and the SETTINGS of modules that
    were imported before the block. The log files and the process group of the block are closed.
    """
    root = logging.root
    loggers = [log for log in root.manager.loggerDict.values() if isinstance(log, logging.Logger)]
    logs = [
        (log, [*log.handlers], [*log.filters], log.level, log.propagate) for log in (root, *loggers)
    ]
    own_handlers = {*root.handlers}
    environment, path, hydra = dict(os.environ), [*sys.path], HydraConfig.instance().cfg
    streams, format_warning = (sys.stdout, sys.stderr, sys.excepthook), warnings.formatwarning
    had_group = _has_group()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    settings = [
        (getattr(sys.modules[module], put), getattr(sys.modules[module], get)())
        for module, pairs in SETTINGS.items() if sys.modules.get(module)
        for get, put in pairs
    ]  # fmt: skip
    lightning = sys.modules.get("lightning_utilities.core.rank_zero")
    if lightning is not None:
        put_rank = partial(setattr, lightning.rank_zero_only, "rank")
        settings.append((put_rank, lightning.rank_zero_only.rank))
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for handler in set(root.handlers) - own_handlers:
            for part in (handler, getattr(handler, "target", None)):  # a MemoryHandler has a target
                if part is not None:
                    part.close()
        for log, of_log, filters, level, propagate in logs:
            log.handlers, log.filters, log.propagate = of_log, filters, propagate
            if log.level != level:  # the call clears what every logger remembers of its level
                log.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        if _has_group() and not had_group:  # NCCL warns if a process ends with a group
            sys.modules["torch.distributed"].destroy_process_group()
        (sys.stdout, sys.stderr, sys.excepthook), warnings.formatwarning = streams, format_warning
        HydraConfig.instance().cfg = hydra
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) != handler:
                    signal.signal(number, handler)
        for put, value in settings:
            put(value)


def _has_group() -> bool:
    """Return whether this process has torch's default process group."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def restore_after_commands() -> None:
    """Make each command that a test runs in this process leave the process as it was."""
    from gptrain import config
    from gptrain.config import cli

    cli.run_command = unchanged_process()(cli.run_command)
    config.main = cli.main = unchanged_process()(cli.main)

"""Fork ranks from a process that has imported everything, so that a rank starts in half a second.

The ranks are those of `trainer.devices`: torch's agent starts them, with torchrun's variables, and
each of them runs train.py. The ranks and this process do not measure the speed of the machine,
which would take 0.1 s per run.

A child of a fork server inherits the output streams, the environment and the folder that the server
had when it started, and not those of this process. Therefore each rank gets them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hydra.core.global_hydra import GlobalHydra
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import start_processes

from gptrain.lit import measure
from gptrain.runtime import launch
from gptrain.runtime.signals import SIGNALS
from tests.fast import some_flops_per_s

ROOT = str(Path(__file__).parents[1])


def server() -> ForkServerContext:
    """Return the context that forks processes from a process that has imported tests/warm.py."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    paths = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    with patch.dict(os.environ, PYTHONPATH=paths):  # before Python 3.13, a server has no sys.path
        forkserver.ensure_running()
    return context


@contextmanager
def forked_ranks(out: Path, err: Path) -> Iterator[None]:
    """Fork the ranks that start in the block; they append their output to these files."""
    server()
    with (
        patch.object(launch, "elastic_launch", partial(start_forked, out, err)),
        patch.object(torch.multiprocessing, "spawn", partial(spawn_forked, out, err)),
        patch.object(measure, "measure_matmul", some_flops_per_s),
    ):
        yield


def start_forked(
    out: Path, err: Path, config: LaunchConfig, _: str, method: str = "forkserver"
) -> Callable[..., dict[int, Any]]:
    """Return the launch of a function in forked processes, in place of a command."""
    config.start_method = method
    place = (out, err, dict(os.environ), os.getcwd())
    return lambda _, *command: elastic_launch(config, run_command)(*place, *command)


def spawn_forked(out: Path, err: Path, function: Callable, arguments: tuple, n_ranks: int) -> None:
    """Run a function in forked processes, as `torch.multiprocessing.spawn` does."""
    place = (function, out, err)
    start_processes(run_function, (*place, *arguments), n_ranks, start_method="forkserver")


def run_function(rank: int, function: Callable, out: Path, err: Path, *arguments: Any) -> None:
    """Call a function in a rank, with its output in these files."""
    append_output(out, err)
    function(rank, *arguments)


def append_output(out: Path, err: Path) -> None:
    """Append the output of this process to these files."""
    sys.stdout.flush()
    for path, fd in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)


def run_command(
    out: Path, err: Path, environment: dict[str, str], folder: str, script: str, *words: str
) -> None:
    """Run a Python script as a rank, with its output in these files."""
    for number in SIGNALS:  # a process that was forked within a run has the handlers of its parent
        signal.signal(number, signal.SIG_DFL)
    measure.measure_matmul = some_flops_per_s
    append_output(out, err)
    ends = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    is_of_torchrun = lambda name: name.endswith(ends) or name.startswith("TORCHELASTIC_")  # noqa: E731
    of_torch = {name: os.environ[name] for name in filter(is_of_torchrun, os.environ)}
    os.environ.clear()
    os.environ.update(environment | of_torch)
    os.chdir(folder)
    GlobalHydra.instance().clear()
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")

"""Fork ranks from a process that has imported everything, so that a rank starts in 0.1 s.

The ranks and this process do not measure the speed of the machine, which would take 0.1 s per run.

A child of a fork server inherits the output streams that the server had when it started, and not
those of this process. Therefore each rank gets the paths of the files for its output.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from gptrain.runtime import measure, supervisor

PRELOAD = [  # before Python 3.13, a fork server can only import installed packages
    "gptrain.assemble",
    "gptrain.config.cli",
    "gptrain.runtime.supervisor",
    "gptrain.lit.loggers",
    "gptrain.lit.perf",
    "gptrain.parallel.pipeline",
    "gptrain.checkpoints.safe_load",
    "hydra._internal.utils",
    "pytest",
    "torch._dynamo",  # every optimizer of torch imports torch._dynamo
    "torchmetrics.classification",
]


@contextmanager
def forked_ranks(out: Path, err: Path) -> Iterator[None]:
    """Fork the ranks that start in the block; they append their output to these files."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with (
        patch.object(supervisor, "START_METHOD", "forkserver"),
        patch.object(supervisor, "rank_process", partial(rank_process, out, err)),
        patch.object(measure, "measure_matmul", some_flops_per_s),
    ):
        yield


def rank_process(out: Path, err: Path, *args: object) -> None:
    """Run the supervisor's entry point of a rank, with its output in these files."""
    from gptrain.runtime.rank import rank_process as enter
    from tests.fast import make_fast
    from tests.no_network import forbid_network

    forbid_network()
    make_fast()
    measure.measure_matmul = some_flops_per_s
    sys.stdout.flush()
    for path, fd in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    # The parent of this process is the fork server, which ends together with the supervisor.
    enter(*args[:-1], os.getppid())


def some_flops_per_s(*_: object) -> float:
    """Return a constant speed, in FLOP/s, instead of measuring it."""
    return 1e10

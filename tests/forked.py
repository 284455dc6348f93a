"""Ranks forked from a process that has imported everything: a start in a tenth of a second.

Neither they nor this process measure how fast the machine multiplies, a tenth of a second a run.

A fork server's children write where the server wrote when it started, not where this process does
now, so that each rank is told a file for its output.
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

PRELOAD = [  # what is installed; of Python below 3.13 a fork server finds nothing else
    "gptrain.assemble",
    "gptrain.config.cli",
    "gptrain.runtime.supervisor",
    "gptrain.lit.loggers.csv",
    "gptrain.lit.perf",
    "gptrain.parallel.ddp",
    "gptrain.parallel.diloco",
    "gptrain.parallel.pipeline",
    "gptrain.parallel.sharded",
    "gptrain.checkpoints.safe_load",
    "hydra._internal.utils",
    "pytest",
    "torch._dynamo",  # of every optimizer
    "torchmetrics.classification",
]


@contextmanager
def forked_ranks(out: Path, err: Path) -> Iterator[None]:
    """Ranks that are started in the block are forked, and append what they say to these files."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with (
        patch.object(supervisor, "START_METHOD", "forkserver"),
        patch.object(supervisor, "rank_process", partial(rank_process, out, err)),
        patch.object(measure, "measure_matmul", some_flops_per_s),
    ):
        yield


def rank_process(out: Path, err: Path, *args: object) -> None:
    """The supervisor's entry of a rank, with its output in these files."""
    from no_network import forbid_network

    from gptrain.runtime.rank import rank_process as enter

    forbid_network()
    measure.measure_matmul = some_flops_per_s
    sys.stdout.flush()
    for path, fd in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    # Its parent is the fork server, which ends with the supervisor.
    enter(*args[:-1], os.getppid())


def some_flops_per_s(*_: object) -> float:
    """In place of a measurement."""
    return 1e10

"""A run in a process leaves nothing behind in it, however the run ends."""

from __future__ import annotations

import locale
import logging
import os
import random
import shutil
import signal
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from tests.conftest import TINY
from tests.run import same, train


def state_of_process() -> dict:
    """Return everything that a run may change in its process, except the imported modules."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {
        "logs": {
            log.name: (log.handlers[:], log.filters[:], log.level, log.propagate, log.disabled)
            for log in loggers
            if isinstance(log, logging.Logger)
        },
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "environment": dict(os.environ),
        "path": [*sys.path],
        "streams": (sys.stdout, sys.stderr, sys.excepthook, threading.excepthook),
        "warnings": (warnings.filters[:], warnings.formatwarning, warnings.showwarning),
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),
        "torch": (
            torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.get_default_device(), torch.backends.cudnn.benchmark, dist.is_initialized(),
        ),
        "rank": rank_zero_only.rank,
    }  # fmt: skip


RUNS = {
    "good": (0, ("trainer.deterministic=true", "seed=5")),
    "refused": (2, ("model.n_headz=2",)),
    "failed": (70, ("data.train._target_=tests.test_process.Broken", "trainer.max_steps=10")),
    "sweep": (0, ("-m", "seed=1,2", "hydra.sweep.dir=${output_dir}/sweep")),
    "ddp": (0, ("strategy=ddp", "trainer.devices=1")),
}


class Broken(torch.utils.data.Dataset):
    """A dataset with a sample that cannot be read."""

    def __init__(self, **sizes: int):
        self.sizes = sizes

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int):
        if index == 13:
            raise RuntimeError("this sample cannot be read")
        return torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_leaves_its_process_as_it_was(name):
    code, words = RUNS[name]
    train(*TINY, "trainer.max_steps=1")  # imports what a run imports
    before = state_of_process()
    run = train(*TINY, *words, cached=False)
    after = state_of_process()
    assert run.code == code, run.err
    after["logs"] = {name: after["logs"][name] for name in before["logs"]}  # without new loggers
    assert not same(after, before)


def test_a_later_run_does_not_write_into_the_folder_of_an_earlier_one():
    first = train(*TINY, cached=False)
    shutil.rmtree(first.folder)
    logging.getLogger("gptrain").warning("a line of nobody's run")
    second = train(*TINY, cached=False)
    assert (first.code, second.code) == (0, 0)
    assert not first.folder.exists()
    assert "nobody" not in (second.folder / "train.log").read_text()

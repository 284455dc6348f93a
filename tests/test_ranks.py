"""Two processes over gloo: one run, whichever launcher started them.

Spawned ones, as a person's are, start in test_project.py and test_signals.py.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from threading import Thread

import pytest
import torch
from lightning.pytorch import Callback

from gptrain.checkpoints.status import PreemptedError
from gptrain.parallel.mesh import start_group
from tests.command_line import unwatched
from tests.processes import wait_until

LOGGED = ("logger=none", "trainer.log_every_n_steps=1", "data.global_batch_size=8")


class Warns(Callback):
    """Logs a warning and a detail on each rank, and warns as Python does."""

    def on_fit_start(self, trainer, pl_module) -> None:
        logging.getLogger(__name__).warning("warning: of each rank")
        logging.getLogger(__name__).debug("a detail of the first rank")
        warnings.warn("of the first rank", stacklevel=1)


def test_two_ranks_write_one_log_whatever_their_folder_is_called(train):
    """The tests in tests/strategies compare the training of two ranks with one rank."""
    log = "hydra.job_logging.formatters.file.format='[${name}] %(message)s'"  # a key of the run
    warns = "+callbacks.warns._target_=tests.test_ranks.Warns"
    words = (*LOGGED, log, warns, "hydra.verbose=tests.test_ranks", "trainer.devices=2")
    two = train(*words, name="two words = ä")
    assert two.code == 0, two.err
    assert "warning:" not in two.err and two.err.count("UserWarning: of the first rank") == 1
    names = {path.name for path in two.folder.iterdir()}
    assert {"train.log", "result.json", "status.json", ".hydra", "checkpoints"} <= names
    assert not [name for name in names if "rank" in name or "process" in name]
    labels = [line.split()[0] for line in two.out.splitlines()]
    names = ["model", "strategy", "batch", "run", "warning:", "result", "next"]
    assert labels == names  # the other rank logs errors only
    lines = (two.folder / "train.log").read_text().splitlines()
    assert "[train] a detail of the first rank" in lines  # not on the terminal
    assert len(lines) == len(labels) + 1 and all(line.startswith("[train] ") for line in lines)


def test_a_request_to_stop_ends_the_wait_for_a_rank_that_never_comes(monkeypatch):
    # An earlier test of this process may have made a group.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    guard, device = unwatched(), torch.device("cpu")
    store = torch.distributed.HashStore()

    def stop() -> None:
        wait_until(lambda: store.num_keys() > 0, timeout_s=60)
        os.kill(os.getpid(), signal.SIGTERM)

    with guard.stop, guard:
        Thread(target=stop, daemon=True).start()
        with pytest.raises(PreemptedError), guard.nothing_to_save():
            start_group("gloo", device, 0, 2, 600.0, store)
    with pytest.raises(TimeoutError):
        start_group("gloo", device, 0, 3, 0.1, store)

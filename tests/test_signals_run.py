"""Runs that are asked to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from gptrain.checkpoints.status import read_status
from tests.conftest import ROOT, TINY
from tests.processes import LOOPBACK, family, is_alive, listeners, wait_until

LONG = ("trainer.max_steps=100000", "trainer.max_epochs=-1", "logger=none",
        "checkpoint=every_n_steps", "checkpoint.every_n_steps=20")  # fmt: skip


@pytest.fixture
def process(tmp_path):
    """A run of two ranks, which ends with the test, with all it started."""
    words = (*TINY, *LONG, f"run_dir={tmp_path}/run", "trainer.devices=2", "data.num_workers=1")
    command = [sys.executable, "train.py", *words]
    with (tmp_path / "stderr").open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file)
    yield process
    for pid in family(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_two_ranks_listen_only_on_loopback_and_save_on_a_signal(process, tmp_path):
    saved = tmp_path / "run/checkpoints/step-00000020"
    wait_until(lambda: saved.exists() or process.poll() is not None, timeout_s=200)
    processes = list(family(process.pid))
    assert len(processes) >= 5  # the parent, two ranks, a worker in each
    assert {name for pid in processes for name in listeners(pid)} <= LOOPBACK
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    status = read_status(tmp_path / "run")
    assert status["cause"] == "preempted" and status["exit_code"] == 75
    assert status["checkpoint"].endswith(f"step-{status['step']:08d}")
    assert (tmp_path / "stderr").read_text() == ""
    wait_until(lambda: not any(map(is_alive, processes)), timeout_s=30)

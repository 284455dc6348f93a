"""Real commands, asked to stop: started here as a user starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from gptrain.resilience.status import read_status
from tests.conftest import ROOT, TINY
from tests.processes import LOOPBACK, family, is_alive, listeners, wait_for, wait_until

LONG = (*TINY, "trainer.max_steps=100000", "trainer.max_epochs=-1", "logger=none",
        "checkpoint=every_n_steps", "checkpoint.every_n_steps=20")  # fmt: skip


@pytest.fixture
def start(tmp_path):
    """Starts `python <words>`; it is gone, with all that it started, when the test ends."""
    started = []

    def start(*words: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *words, *LONG, f"run_dir={tmp_path}/run"],
            cwd=ROOT,
            stdout=(tmp_path / "output").open("wb"),
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_two_ranks_listen_on_loopback_alone_and_leave_saved_when_their_parent_is_told(
    start, tmp_path
):
    process = start("train.py", "trainer.devices=2", "data.num_workers=1")
    wait_for(tmp_path / "run/checkpoints/step-00000020", process)
    processes = list(family(process.pid))
    assert len(processes) >= 5  # the parent, two ranks, a worker in each
    assert {name for pid in processes for name in listeners(pid)} <= LOOPBACK
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    told = read_status(tmp_path / "run")
    assert told["cause"] == "preempted" and told["exit_code"] == 75
    assert told["checkpoint"].endswith(f"step-{told['step']:08d}")
    wait_until(lambda: not any(map(is_alive, processes)), timeout_s=30)


def test_a_run_that_is_told_before_its_first_step_leaves_with_75(start, tmp_path):
    process = start("train.py")
    wait_for(tmp_path / "run/.hydra/config.yaml", process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    told = read_status(tmp_path / "run")
    assert told["cause"] == "preempted" and told["exit_code"] == 75

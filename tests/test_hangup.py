"""A closed terminal is a request to stop: the run saves its step and exits with 75."""

from __future__ import annotations

import os
import pty
import signal
import sys

import pytest

from gptrain.checkpoints.status import read_status
from tests.conftest import ROOT, TINY
from tests.processes import wait_until

LONG = (
    *TINY, "trainer.max_steps=100000", "trainer.max_epochs=-1", "logger=none",
    "checkpoint=every_n_steps", "checkpoint.every_n_steps=20", "trainer.enable_progress_bar=true",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_and_ends(tmp_path):
    words = (*LONG, f"run_dir={tmp_path}/run", "trainer.devices=2")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, "train.py", *words])
    saved = tmp_path / "run/checkpoints/step-00000020"
    os.set_blocking(terminal, False)
    try:
        wait_until(lambda: drained(terminal) and saved.exists(), timeout_s=200)
        os.close(terminal)
        ended: list[int] = []
        wait_until(lambda: has_ended(pid, ended), timeout_s=60)
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended[0]) == 75
    status = read_status(tmp_path / "run")
    assert status["cause"] == "preempted" and status["step"] > 20
    assert status["checkpoint"].endswith(f"step-{status['step']:08d}")


def drained(terminal: int) -> bool:
    """Read what a program has written to its terminal, so that it never waits for a reader."""
    try:
        while os.read(terminal, 65536):
            pass
    except BlockingIOError:
        return True
    return False


def has_ended(pid: int, ended: list[int]) -> bool:
    """Return whether a child has ended, and append its wait status to `ended` if so."""
    number, status = os.waitpid(pid, os.WNOHANG)
    if number:
        ended.append(status)
    return bool(number)

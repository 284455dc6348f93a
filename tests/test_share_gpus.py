"""Jobs of submitit_local on one machine: each has GPUs of its own, or waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest

from gptrain.runtime.process import reserve_gpus

TAKE = """
import os, sys
from gptrain.runtime.process import reserve_gpus
reserve_gpus(int(sys.argv[1]))
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
sys.stdin.read()
"""


def job(n: int) -> subprocess.Popen:
    """Numbers that no machine has: its own jobs may be running."""
    shown = {"SUBMITIT_EXECUTOR": "local", "CUDA_VISIBLE_DEVICES": "900,901,902"}
    return subprocess.Popen(
        [sys.executable, "-c", TAKE, str(n)], text=True, env=os.environ | shown,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_jobs_share_out_the_gpus_and_the_last_one_waits_for_the_first():
    first = job(2)
    assert first.stdout.readline() == "900,901\n"
    second = job(1)
    assert second.stdout.readline() == "902\n"
    third = job(2)
    first.communicate()
    assert third.stdout.readline() == "900,901\n"
    second.communicate()
    third.communicate()


def test_outside_local_sweeps_all_visible_gpus_stay_visible(monkeypatch):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "900,901,902")
    reserve_gpus(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "900,901,902"
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    # Too many do not wait for ever: the start of the run reports that one is missing.
    for devices, shown in ((3, "910,911"), ("auto", "912,913")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        reserve_gpus(devices)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == shown


def test_a_job_waits_rather_than_take_fewer_gpus_than_it_asks_for(monkeypatch):
    class WaitedError(Exception):
        pass

    def sleep(_: float) -> None:
        raise WaitedError

    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setattr(time, "sleep", sleep)
    for expected in (nullcontext(), pytest.raises(WaitedError)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "920,921,922")
        with expected:
            reserve_gpus(2)
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "920,921"

"""A request to stop is a flag: real signals to real processes, and to a run of two ranks."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gptrain.checkpoints.status import PreemptedError, read_status
from gptrain.runtime.signals import SAME_REQUEST_S, SIGNALS, StopFlag
from gptrain.runtime.watchdog import Guard
from tests.conftest import ROOT, TINY
from tests.processes import LOOPBACK, family, is_alive, listeners, wait_until

RUN = """
import sys, time
from gptrain.runtime.signals import StopFlag
with StopFlag() as flag:
    print("ready", end="", flush=True)
    stop_s = time.monotonic() + 60
    while time.monotonic() < stop_s:
        time.sleep(0.01)
        if flag:
            print(flag.signal, flush=True)
            time.sleep(float(sys.argv[1]))  # the save
            sys.exit(75)
"""
WORKER = """
import os, signal, sys, time
from gptrain.runtime.signals import StopFlag, ignore_in_worker
with StopFlag() as flag:
    worker = os.fork()
    if worker == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # as in a worker that was not forked
        ignore_in_worker()
        os.write(1, b"ready")
        time.sleep(60)
    while os.waitpid(worker, os.WNOHANG) == (0, 0) and not flag:
        time.sleep(0.01)
    time.sleep(0.3)
    alive = os.waitpid(worker, os.WNOHANG) == (0, 0)
    os.kill(worker, signal.SIGKILL)
    print(flag.signal, alive)
"""
BEGINNING = """
import os
from gptrain.lit.datamodule import Loader
from gptrain.runtime.signals import StopFlag
with StopFlag() as flag:
    os.write(1, b"ready")
    print(*Loader(range(2), num_workers=1, worker_init_fn=lambda _: os.killpg(0, 15)), flag.signal)
"""


@pytest.fixture
def start():
    """Starts a program in a process group of its own and waits until it is ready."""
    started = []

    def start(program: str, *arguments: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.read(5) == b"ready"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_interrupt_leaves_at_once(start):
    process = start(RUN, "60")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"SIGINT\n"
    time.sleep(2 * SAME_REQUEST_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert b"interrupted twice" in process.stderr.read()


def test_a_scheduler_that_signals_often_does_not_end_the_run_early(start):
    process = start(RUN, "0.7")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.1)
    assert process.wait(30) == 75
    assert process.stdout.read() == b"SIGUSR1\n"


def test_a_data_worker_survives_signals_to_the_group(start):
    process = start(WORKER)
    for number in SIGNALS:
        os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=30)
    assert out.decode().split()[1] == "True"


@pytest.mark.slow
def test_a_data_worker_survives_signals_while_it_begins(start):
    out, _ = start(BEGINNING).communicate(timeout=60)
    assert out.decode() == "tensor([0]) tensor([1]) SIGTERM\n"


@pytest.mark.parametrize(("handler", "is_asked"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_a_closed_terminal_stops_a_run_unless_nohup_has_started_it(handler, is_asked):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with StopFlag() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
            assert bool(flag) == is_asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_where_nothing_can_be_saved_a_signal_ends_the_wait_at_once():
    """A library that catches every Exception, such as Hydra, does not catch this error."""
    with StopFlag() as flag, Guard(flag, 0, 60.0, print) as guard:
        started_s = time.monotonic()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(PreemptedError), guard.nothing_to_save():
            try:
                time.sleep(30)  # a corpus is tokenized
            except Exception as error:
                raise ImportError("error locating target") from error
        assert time.monotonic() - started_s < 10
        with pytest.raises(PreemptedError), guard.nothing_to_save():
            pytest.fail("it was asked to stop before")
        os.kill(os.getpid(), signal.SIGTERM)  # a flag again
        assert flag.signal == "SIGTERM"


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

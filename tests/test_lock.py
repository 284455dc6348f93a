"""One run, one folder: the lock against real processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gptrain.checkpoints.lock import RunLock, is_held, read_run_id
from gptrain.core.errors import ConfigError

FORK = multiprocessing.get_context("fork")
HOLD = """
import sys, time
from gptrain.checkpoints.lock import RunLock
lock = RunLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process of its own that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_until_the_holder_is_killed(tmp_path, holder):
    with pytest.raises(ConfigError) as refused:
        RunLock(tmp_path, wait_s=0).acquire()
    assert refused.value.code == 73 and refused.value.problems[0].key == "run_dir"
    assert is_held(tmp_path)
    run_id = read_run_id(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_held(tmp_path) and read_run_id(tmp_path) == run_id
    with RunLock(tmp_path) as lock:
        assert lock.run_id == run_id


def _forked_worker_outlives_its_run(run_dir, pids):
    with RunLock(run_dir):
        worker = FORK.Process(target=time.sleep, args=(60,))
        worker.start()
        pids.send((os.getpid(), worker.pid))
        time.sleep(60)


def test_a_forked_data_worker_does_not_keep_the_folder_of_a_killed_run(tmp_path):
    parent_end, child_end = FORK.Pipe()
    run = FORK.Process(target=_forked_worker_outlives_its_run, args=(tmp_path, child_end))
    run.start()
    run_pid, worker_pid = parent_end.recv()
    try:
        with pytest.raises(ConfigError):
            RunLock(tmp_path, wait_s=0).acquire()
        os.kill(run_pid, signal.SIGKILL)
        run.join()
        os.kill(worker_pid, 0)  # the worker is alive …
        RunLock(tmp_path).acquire().release()  # … and holds nothing
    finally:
        os.kill(worker_pid, signal.SIGKILL)


def _compete(run_dir, start, winners, end):
    start.wait()
    try:
        lock = RunLock(run_dir).acquire()
    except ConfigError:
        winners.put("refused")
    else:
        winners.put("holds")
        end.wait()
        lock.release()


def test_of_simultaneous_starts_exactly_one_wins(tmp_path):
    start, winners, end = FORK.Event(), FORK.Queue(), FORK.Event()
    arguments = (tmp_path, start, winners, end)
    runs = [FORK.Process(target=_compete, args=arguments) for _ in range(5)]
    for run in runs:
        run.start()
    start.set()
    answers = [winners.get(timeout=60) for _ in runs]
    end.set()
    for run in runs:
        run.join()
    assert sorted(answers) == ["holds", *["refused"] * 4]


def test_a_start_waits_as_long_as_it_may_for_another_to_leave(holder, tmp_path):
    timer = threading.Timer(0.5, holder.kill)
    timer.start()
    with RunLock(tmp_path, wait_s=60):
        timer.join()

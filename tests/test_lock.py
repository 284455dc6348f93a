"""One run, one folder: the lock against real processes, and who writes status.json."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from gptrain.checkpoints import files
from gptrain.checkpoints.lock import RunLock, is_held, read_run_id
from gptrain.checkpoints.status import read_status, write_status
from gptrain.core.errors import ConfigError

FORK = multiprocessing.get_context("fork")
HOLD = """
import sys, time
from gptrain.checkpoints.lock import RunLock
with RunLock(sys.argv[1]):
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
    with pytest.raises(ConfigError) as refused, RunLock(tmp_path, wait_s=0):
        pass
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
        with pytest.raises(ConfigError), RunLock(tmp_path, wait_s=0):
            pass
        os.kill(run_pid, signal.SIGKILL)
        run.join()
        os.kill(worker_pid, 0)  # the worker is alive …
        with RunLock(tmp_path):  # … and holds nothing
            pass
    finally:
        os.kill(worker_pid, signal.SIGKILL)


def test_a_start_waits_as_long_as_it_may_for_another_to_leave(holder, tmp_path):
    timer = threading.Timer(0.5, holder.kill)
    timer.start()
    with RunLock(tmp_path, wait_s=60):
        timer.join()


def test_the_first_rank_that_fails_tells(tmp_path):
    facts = {"cause": "error", "exit_code": 70, "rank": 1, "step": 12, "message": "the reason"}
    assert write_status(tmp_path, checkpoint=tmp_path / "step-00000010", **facts)
    assert not write_status(tmp_path, cause="error", exit_code=70, rank=0, message="lost a peer")
    about = {"checkpoint": f"{tmp_path}/step-00000010", "pid": os.getpid()}
    about["host"] = socket.gethostname()
    assert read_status(tmp_path).items() >= (facts | about).items()
    assert os.listdir(tmp_path) == ["status.json"]  # no temporary files


def test_a_rank_that_fails_when_another_is_done_is_heard_and_the_parent_last(tmp_path):
    write_status(tmp_path, cause="preempted", exit_code=75)
    (tmp_path / "status.json").unlink()
    assert write_status(tmp_path, cause="done", exit_code=0, rank=0)
    assert write_status(tmp_path, cause="error", exit_code=70, rank=1)
    assert not write_status(tmp_path, cause="done", exit_code=0, rank=0)
    assert read_status(tmp_path)["rank"] == 1
    assert write_status(tmp_path, cause="killed", exit_code=70, rank=2, replace=True)
    assert read_status(tmp_path)["rank"] == 2


@pytest.mark.parametrize("text", ["", "[]", '{"exit_code": "x"}'])
def test_an_invalid_status_file_is_ignored(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None
    with pytest.raises(OSError):  # a status that cannot be written is an error
        write_status(tmp_path / "missing", cause="done", exit_code=0)


def test_a_result_is_plain_json_also_when_a_metric_is_not_finite(tmp_path):
    metrics, facts = {"val/loss": 1.5, "test/loss": float("nan")}, {"steps": 60, "tokens": 1920}
    for _ in range(2):  # a resumed run writes its result over the old one
        files.replace(tmp_path / "result.json", files.to_json({"metrics": metrics, **facts}))
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert result == {"metrics": {"val/loss": 1.5, "test/loss": None}, **facts}
    assert os.listdir(tmp_path) == ["result.json"]

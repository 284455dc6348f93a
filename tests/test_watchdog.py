"""A rank that makes no progress ends, and none is ended that only takes its time."""

import signal
import subprocess
import sys
import time

import pytest
from processes import is_alive, wait_until

from gptrain.checkpoints.status import read_status

RANK = """
import os, sys, time
from gptrain.runtime import watchdog
from gptrain.runtime.signals import StopFlag
run_dir, what, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
if what == "agent":
    os.environ["TORCHELASTIC_RUN_ID"] = "a"
describe = lambda: {"resume": "python train.py ckpt_path=last"}
guard = watchdog.Guard(run_dir, StopFlag(), rank=3, timeout_s=timeout_s, describe=describe)
with guard:
    print("ready", flush=True)
    for step in range(10**6):
        if what != "hang" or step < 3:
            guard.beat(step, "forward")
        if what == "allow" and step == 3:
            guard.beat(step, "compile", allow_s=600)
            time.sleep(timeout_s + 2)
            break
        time.sleep(0.05)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a rank and waits until it runs."""
    started = []

    def start(what: str, timeout_s: float) -> subprocess.Popen:
        command = [sys.executable, "-c", RANK, str(tmp_path), what, str(timeout_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_rank_without_progress_ends_with_76_its_stacks_and_a_status(tmp_path, start):
    process = start("hang", 2.0)
    error = process.communicate(timeout=100)[1].decode()
    assert process.returncode == 76
    status = read_status(tmp_path)
    assert (status["cause"], status["exit_code"], status["rank"]) == ("hang", 76, 3)
    assert "rank 3 at step " in status["message"] and "phase forward" in status["message"]
    assert status["message"] in error and "most recent call first" in error
    assert status["resume"] == "python train.py ckpt_path=last"


def test_a_rank_that_has_announced_a_long_call_is_not_ended(tmp_path, start):
    process = start("allow", 2.0)
    assert process.wait(100) == 0 and read_status(tmp_path) is None


def test_time_in_which_the_process_was_stopped_is_no_silence(tmp_path, start):
    """Ctrl-Z and fg stop and continue the process."""
    process = start("run", 20.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.0)
    assert read_status(tmp_path) is None


PARENT = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
rank.stdout.readline()
print(rank.pid, flush=True)
time.sleep(600)
"""


def test_a_rank_does_not_outlive_the_agent_that_has_started_it(tmp_path):
    command = [sys.executable, "-c", PARENT, RANK, str(tmp_path), "agent", "600"]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    rank = int(agent.stdout.readline())
    agent.kill()
    agent.communicate()
    wait_until(lambda: not is_alive(rank), 60)

"""A rank that makes no progress ends, and none is ended that only takes its time."""

import signal
import subprocess
import sys
import time

from gptrain.checkpoints.status import read_status
from tests.processes import is_alive, wait_until

RANK = """
import os, sys, time
from gptrain.checkpoints.status import write_status
from gptrain.runtime import watchdog
from gptrain.runtime.signals import StopFlag
run_dir, what, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
if what == "agent":
    os.environ["TORCHELASTIC_RUN_ID"] = "a"
def report(ending, rank, step):
    print(ending.line, file=sys.stderr)
    facts = {"cause": ending.cause, "exit_code": ending.code, "message": ending.line}
    write_status(run_dir, rank=rank, step=step, **facts)
guard = watchdog.Guard(StopFlag(), 3, timeout_s, report)
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


def test_a_rank_ends_with_its_stacks_and_a_status_if_it_makes_no_progress_and_only_then(tmp_path):
    """One rank has announced a long call, and one is stopped and continued (Ctrl-Z)."""
    started = {}
    for what, timeout_s in (("hang", 2.0), ("allow", 2.0), ("run", 20.0)):
        (tmp_path / what).mkdir()
        command = [sys.executable, "-c", RANK, str(tmp_path / what), what, str(timeout_s)]
        pipe = subprocess.PIPE
        started[what] = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        hangs, allows, runs = started.values()
        assert runs.stdout.readline() == "ready\n"
        runs.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        runs.send_signal(signal.SIGCONT)
        error = hangs.communicate(timeout=100)[1]
        assert hangs.returncode == 76 and allows.wait(100) == 0 and runs.poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
    assert read_status(tmp_path / "allow") is read_status(tmp_path / "run") is None
    status = read_status(tmp_path / "hang")
    assert (status["cause"], status["exit_code"], status["rank"]) == ("hang", 76, 3)
    assert "rank 3 at step " in status["message"] and "phase forward" in status["message"]
    assert status["message"] in error and "most recent call first" in error


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

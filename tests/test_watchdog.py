"""No rank waits for ever, and none is ended that only takes its time."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from processes import is_alive, wait_until

from gptrain.checkpoints.status import read_status, write_status
from gptrain.core.errors import JobFailed
from gptrain.runtime import supervisor
from gptrain.runtime.signals import StopFlag
from gptrain.runtime.watchdog import Guard, Heartbeat, Silence, StallWatch, read_lives

FORK = multiprocessing.get_context("fork")
# A rank that does what it is told. One that shall hang may do so early; one that shall go on must
# not be taken for hung where the machine keeps it waiting.
HANG_S, RUN_S = 0.6, 3.0
RANK = """
import os, sys, time
from gptrain.runtime import watchdog
from gptrain.runtime.signals import StopFlag, die_with_parent
watchdog.GRACE_S, watchdog.POLL_S = 0.5, 0.1
run_dir, rank, what, timeout_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
if what == "orphan":
    die_with_parent(os.getppid())
guard = watchdog.Guard(run_dir, run_dir + "/lives", StopFlag(), rank=rank, timeout_s=timeout_s,
                       parent_pid=os.getppid() if what == "poll" else None).__enter__()
heartbeat = guard.heartbeat
print("ready", flush=True)
if what == "lock":
    import re
    re.match("(a?){40}a{40}", "a" * 40)  # holds the interpreter lock for hours
for step in range(10**6):
    if what == "hang alone" and step == 3:
        os.unlink(run_dir + "/lives/rank-00000")
    if "hang" not in what or step < 3:
        heartbeat.beat(step, "forward")
    if what == "allow" and step == 3:
        heartbeat.beat(step, "compile", allow_s=60)
        time.sleep(timeout_s + 1)
        os._exit(0)
    time.sleep(0.05)
"""


@pytest.fixture
def start(tmp_path):
    """Starts ranks in one run folder and waits until they run."""
    started = []

    def start(rank: int, what: str, folder=tmp_path) -> subprocess.Popen:
        timeout_s = RUN_S if what in ("run", "allow") else HANG_S
        command = [sys.executable, "-c", RANK, str(folder), str(rank), what, str(timeout_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("what", ["hang", "hang alone"])
def test_a_rank_without_progress_ends_with_76_its_stacks_and_a_status(tmp_path, start, what):
    """Also where its heartbeats were removed."""
    process = start(0, what)
    error = process.communicate(timeout=60)[1].decode()
    told = read_status(tmp_path)
    assert (told["cause"], told["exit_code"], told["step"]) == ("hang", process.returncode, 2)
    assert process.returncode == 76 and "rank 0 is waiting at step 2" in told["message"]
    assert "rank 0: no progress for " in error
    assert re.search(r'File "<string>", line \d+ in <module>', error)


def test_a_stopped_rank_is_named_by_the_rank_that_waits_for_it(tmp_path, start):
    stopped, waiting = start(1, "run"), start(0, "hang")
    stopped.send_signal(signal.SIGSTOP)
    assert waiting.wait(60) == 76
    told = read_status(tmp_path)
    assert told["rank"] == 1 and "rank 1 is stopped" in told["message"]


@pytest.mark.parametrize(
    "cause, code, said",
    [("nonfinite", 79, "leaving: rank 1 has failed"), ("hang", 76, "most recent call first")],
)
def test_a_rank_whose_peer_failed_leaves_with_its_code_and_of_a_hang_shows_its_stacks(
    tmp_path, start, cause, code, said
):
    process = start(0, "run")
    write_status(tmp_path, cause=cause, exit_code=code, rank=1)
    assert process.wait(60) == code
    assert said in process.stderr.read().decode()


def test_nobody_is_ended_who_only_takes_long_or_whose_peer_is_done(tmp_path, start):
    """A rank was stopped and goes on, another has announced a long call; an old status stays."""
    write_status(tmp_path, cause="error", exit_code=70, rank=1)
    stopped, announced = start(0, "run"), start(0, "allow", tmp_path / "other")
    stopped.send_signal(signal.SIGSTOP)
    assert announced.wait(60) == 0
    stopped.send_signal(signal.SIGCONT)
    for code in (75, 0):
        with pytest.raises(subprocess.TimeoutExpired):
            stopped.wait(0.5)
        write_status(tmp_path, cause="done", exit_code=code, rank=1, replace=True)
    with pytest.raises(subprocess.TimeoutExpired):
        stopped.wait(0.5)


PARENT = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
rank.stdout.readline()
print(rank.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("what", ["orphan", "poll"])
def test_a_rank_does_not_outlive_a_killed_launcher(tmp_path, what):
    command = [sys.executable, "-c", PARENT, RANK, str(tmp_path), "0", what, str(RUN_S)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    rank = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not is_alive(rank), 30)


def test_a_held_interpreter_lock_is_seen_from_outside_and_prints_its_stacks(tmp_path, start):
    process = start(0, "lock")
    watch = StallWatch(tmp_path / "lives", HANG_S, stopped_s=0.5)
    wait_until(watch.stalled, 60)
    time.sleep(HANG_S)
    process.kill()
    assert b"in match" in process.communicate()[1]  # by faulthandler's own thread


# The watch from outside, with made-up ranks in this process


def test_a_beating_rank_never_stalls_nor_one_that_announced_it_and_a_silent_one_does(tmp_path):
    alive, silent, compiling = (Heartbeat(tmp_path, rank) for rank in range(3))
    silent.beat(7, "backward")
    compiling.beat(allow_s=60.0)
    watch, stalls = StallWatch(tmp_path, timeout_s=0.3, stopped_s=0.3), []
    while not stalls:
        alive.beat(9, "validation")
        for heart in (alive, silent, compiling):
            heart.tick()
        stalls = watch.stalled()
        time.sleep(0.02)
    (stall,) = stalls
    assert (stall.rank, stall.step, stall.phase, stall.stopped) == (1, 7, "backward", False)
    assert stall.silent_s > 0.6
    silent.beat()
    assert watch.stalled() == []


def test_the_supervisor_waits_as_long_as_the_launchers_option_says(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(supervisor, "StallWatch", lambda *options: waits.append(options))
    for of_launcher in (7.0, None):
        options = {"launcher": {"timeout_s": of_launcher}, "strategy": {"timeout_s": 60.0}}
        supervisor.watch(OmegaConf.create(options), [], None, tmp_path)
    assert waits == [(tmp_path, 7.0), (tmp_path, 60.0)]


@pytest.mark.parametrize("code, cause", [(-9, "killed"), (-11, "killed"), (1, "error")])
def test_ranks_that_end_without_a_word_are_reported(tmp_path, monkeypatch, code, cause):
    """Killed all at once, or ended by Python before they could report anything."""
    ends = []
    monkeypatch.setattr(supervisor, "report_ending", lambda cfg, *ending, **_: ends.append(ending))
    cfg = OmegaConf.create({"launcher": {"timeout_s": 7.0}, "run_dir": str(tmp_path)})
    ranks = 2 * [SimpleNamespace(is_alive=lambda: False, exitcode=code, pid=1)]
    supervisor.watch(cfg, ranks, StopFlag(), tmp_path)
    ((ending, which),) = ends
    assert (ending.cause, ending.code, which) == (cause, 70, 0)
    assert ("want of memory" in ending.line) == (code == -9)  # as the kernel kills
    assert supervisor.job_code(cfg, ranks) == 70
    write_status(tmp_path, cause="nonfinite", exit_code=79, rank=1)
    assert supervisor.job_code(cfg, ranks) == 79  # of the first that failed


def test_the_rank_furthest_behind_comes_first(tmp_path):
    for rank, step in enumerate((5, 3, 5)):
        Heartbeat(tmp_path, rank).beat(step)
    watch = StallWatch(tmp_path, timeout_s=0.0, stopped_s=0.001)
    watch.stalled()
    time.sleep(0.01)
    assert [stall.rank for stall in watch.stalled()] == [1, 0, 2]


def test_of_ranks_at_one_step_the_one_that_was_silent_longest_comes_first(tmp_path):
    waiting, stuck = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    waiting.beat(5)
    stuck.beat(5)
    watch = StallWatch(tmp_path, timeout_s=0.0, stopped_s=0.001)
    watch.stalled()
    time.sleep(0.02)
    waiting.beat(5)
    watch.stalled()
    time.sleep(0.02)
    assert [stall.rank for stall in watch.stalled()] == [1, 0]


def sleep_until_terminated() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(60)


def test_a_rank_that_was_asked_alone_to_stop_lets_the_others_be_asked_at_once(tmp_path):
    cfg = OmegaConf.create({"launcher": {"timeout_s": 60.0}, "run_dir": str(tmp_path)})
    write_status(tmp_path, cause="preempted", exit_code=75, rank=0)
    targets = {os._exit: (75,), sleep_until_terminated: ()}
    ranks = [FORK.Process(target=target, args=given) for target, given in targets.items()]
    for rank in ranks:
        rank.start()
    try:
        supervisor.watch(cfg, ranks, StopFlag(), tmp_path)
        assert [rank.exitcode for rank in ranks] == [75, -signal.SIGTERM]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize("is_asked_to_stop, n_starts", [(False, 3), (True, 1)])
def test_a_lost_rank_is_worth_a_restart_unless_the_job_was_asked_to_stop(
    tmp_path, monkeypatch, is_asked_to_stop, n_starts
):
    starts, stop = [], StopFlag()
    if is_asked_to_stop:
        stop.set("a person")
    monkeypatch.setattr(supervisor, "run_once", lambda *_: starts.append(1) or 70)
    values = {"launcher": {"max_restarts": 2}, "task": "fit", "ckpt_path": None}
    cfg = OmegaConf.create({**values, "run_dir": str(tmp_path)})
    with pytest.raises(JobFailed) as failed:
        supervisor.supervise(sleep_until_terminated, cfg, 2, lambda: cfg, stop)
    assert (failed.value.code, len(starts)) == (70, n_starts)


def test_a_stopped_rank_is_named_though_another_beat_for_the_last_time_before_it(tmp_path):
    waiting, stopped = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    waiting.beat(7)
    stopped.beat(6)
    watch = StallWatch(tmp_path, timeout_s=0.3, stopped_s=0.4)
    watch.stalled()
    time.sleep(0.2)
    waiting.tick()
    stopped.beat(7)  # as late as that, and never again

    while not (stalls := watch.stalled()):
        waiting.tick()
        time.sleep(0.05)
    assert (stalls[0].rank, stalls[0].stopped) == (1, True)


def test_time_in_which_the_watcher_itself_was_stopped_does_not_count():
    silence = Silence()
    assert silence.look(7, now_s=100.0) == 0.0
    assert silence.look(7, now_s=101.5) == 1.5
    assert silence.look(7, now_s=4000.0) == 3.5  # the machine slept for an hour
    assert silence.look(8, now_s=4000.5) == 0.0


def test_a_rank_that_is_done_is_not_missed_and_no_longer_watched(tmp_path):
    with Guard(tmp_path, tmp_path / "lives", StopFlag(), rank=0, timeout_s=60) as guard:
        guard.heartbeat.beat(9, "forward")
        threads = threading.active_count()
        (life,) = read_lives(tmp_path / "lives")
        assert (life.step, life.phase, life.beats) == (9, "forward", 2)
    assert threading.active_count() == threads - 1 and read_lives(tmp_path / "lives") == []


def test_a_heartbeat_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("content")
    (tmp_path / "rank-00000").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        Heartbeat(tmp_path, 0)
    assert (tmp_path / "victim").read_text() == "content"

"""No rank waits for ever, and none is ended that only takes its time."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from processes import is_alive, wait_until

from gptrain.checkpoints.status import read_status, write_status
from gptrain.core.errors import JobFailedError
from gptrain.runtime import supervisor, watchdog
from gptrain.runtime.signals import StopFlag, block_stop_signals
from gptrain.runtime.watchdog import (
    Guard,
    Heartbeat,
    Progress,
    StallWatch,
    hang_message,
    read_progress,
)

FORK = multiprocessing.get_context("fork")
# A rank that hangs may be found early. A rank that must not be found has a longer timeout, because
# a busy machine may keep it waiting.
HANG_S, RUN_S = 0.6, 3.0
RANK = """
import os, sys, time
from gptrain.runtime import watchdog
from gptrain.runtime.signals import StopFlag, die_with_parent
watchdog.GRACE_S, watchdog.POLL_S = 0.5, 0.1
run_dir, rank, what, timeout_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
if what == "orphan":
    die_with_parent(os.getppid())
guard = watchdog.Guard(run_dir, run_dir + "/beats", StopFlag(), rank=rank, timeout_s=timeout_s,
                       describe=lambda: {"resume": "python train.py ckpt_path=last"},
                       parent_pid=os.getppid() if what == "poll" else None).__enter__()
heartbeat = guard.heartbeat
print("ready", flush=True)
for step in range(10**6):
    if what == "hang alone" and step == 3:
        heartbeat.beat(2, allow_s=1.6)
        os.unlink(run_dir + "/beats/rank-00000")
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


@pytest.mark.parametrize("what, limit_s", [("hang", 1), ("hang alone", 2)])
def test_a_rank_without_progress_ends_with_76_its_stacks_and_a_status(
    tmp_path, start, what, limit_s
):
    """The last heartbeat of "hang alone" allows 1.6 seconds, and its file is removed."""
    process = start(0, what)
    error = process.communicate(timeout=60)[1].decode()
    status = read_status(tmp_path)
    assert (status["cause"], status["exit_code"], status["step"]) == ("hang", process.returncode, 2)
    message = f"no progress for {limit_s} s: rank 0 at step 2 in phase forward"
    assert process.returncode == 76 and status["message"] == message
    assert status["resume"] == "python train.py ckpt_path=last"
    assert f"rank 0: {message}" in error
    assert re.search(r'File "<string>", line \d+ in <module>', error)


@pytest.mark.parametrize(
    "cause, code, message",
    [("nonfinite", 79, "leaving: rank 1 has failed"), ("hang", 76, "most recent call first")],
)
def test_a_rank_whose_peer_failed_ends_with_its_code_and_prints_stacks_of_a_hang(
    tmp_path, start, cause, code, message
):
    process = start(0, "run")
    write_status(tmp_path, cause=cause, exit_code=code, rank=1)
    assert process.wait(60) == code
    assert message in process.stderr.read().decode()


def test_slow_ranks_and_ranks_with_a_finished_peer_are_not_killed(tmp_path, start):
    """A rank was stopped and continued, and another rank has announced a long call.

    A status file of an earlier failure has no effect.
    """
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


def hold_the_interpreter_lock(run_dir, beats) -> None:
    options = {"rank": 0, "timeout_s": HANG_S, "parent_pid": os.getppid()}
    with Guard(run_dir, beats, StopFlag(), **options) as guard:
        guard.heartbeat.beat(5, "train", allow_s=HANG_S)
        re.match("(a?){40}a{40}", "a" * 40)  # takes hours, without the interpreter's byte code


def test_a_rank_that_holds_the_interpreter_lock_prints_its_stacks_when_it_is_found_silent(
    tmp_path, monkeypatch, capfd
):
    """The watchdog thread of the rank cannot run, so the supervisor asks for the stacks."""
    monkeypatch.setattr(supervisor, "RANKS_FIRST_S", 0.0)
    monkeypatch.setattr(supervisor, "PRINT_STACKS_S", 1.0)
    reported = []
    monkeypatch.setattr(supervisor, "report_ending", lambda *a, **k: reported.append((a, k)))
    # The last heartbeat allows more, and the message names that time.
    cfg = OmegaConf.create({"launcher": {"timeout_s": 0.45}, "run_dir": str(tmp_path)})
    given = (tmp_path, tmp_path / "beats")
    rank = FORK.Process(target=hold_the_interpreter_lock, args=given, daemon=True)
    rank.start()
    supervisor.watch(cfg, [rank], StopFlag(), tmp_path / "beats")
    assert rank.is_alive()  # `run_once` kills it after the time for the stacks
    rank.kill()
    rank.join()
    assert "in hold_the_interpreter_lock" in capfd.readouterr().err
    (((_, ending, *place), options),) = reported
    where = "rank 0 at step 5 in phase train"
    assert (ending.code, ending.line) == (76, f"error: no progress for 1 s: {where}")
    assert place == [0, 5] and options == {"replace": True}


# The watch from outside, over ranks of this process


def watch_over(folder, timeout_s: float) -> StallWatch:
    return StallWatch(partial(read_progress, folder), timeout_s)


def test_only_a_rank_without_heartbeats_and_announced_calls_is_reported_as_silent(tmp_path):
    alive, silent, compiling = (Heartbeat(tmp_path, rank) for rank in range(3))
    silent.beat(7, "backward")
    compiling.beat(allow_s=60.0)
    watch, silent_ranks, start_s = watch_over(tmp_path, 0.3), [], time.monotonic()
    while not silent_ranks:
        alive.beat(9, "validation")
        silent_ranks = watch.silent_ranks()
        time.sleep(0.02)
    assert time.monotonic() - start_s > 0.3
    assert silent_ranks == [Progress(rank=1, n_beats=2, phase="backward", step=7)]
    silent.beat()
    assert watch.silent_ranks() == []
    assert silent.progress == Progress(rank=1, n_beats=3, phase="backward", step=7)
    assert compiling.progress.allow_s == 60.0
    compiling.beat()
    assert compiling.progress.allow_s == 0.0  # the longer time was for one call


def test_a_hang_is_one_line_with_the_ranks_at_each_place_and_the_earliest_step_first():
    places = [(5, "train"), (3, "data"), (5, "train"), (5, "save")]
    silent = [Progress(rank, 9, phase, step) for rank, (step, phase) in enumerate(places)]
    where = "rank 1 at step 3 in phase data; rank 3 at step 5 in phase save"
    where += "; ranks 0, 2 at step 5 in phase train"
    assert hang_message(silent, 60.0) == f"no progress for 60 s: {where}"


def test_the_supervisor_waits_as_long_as_the_launchers_option_says(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(supervisor, "StallWatch", lambda *options: waits.append(options))
    for of_launcher in (7.0, None):
        options = {"launcher": {"timeout_s": of_launcher}, "strategy": {"timeout_s": 60.0}}
        supervisor.watch(OmegaConf.create(options), [], None, tmp_path)
    ranks_first_s = supervisor.RANKS_FIRST_S
    assert [timeout_s - ranks_first_s for _, timeout_s in waits] == [7.0, 60.0]


@pytest.mark.parametrize("code, cause", [(-9, "killed"), (-11, "killed"), (1, "error")])
def test_ranks_that_end_without_a_word_are_reported(tmp_path, monkeypatch, code, cause):
    """Killed all at once, or ended by Python before they could report anything."""
    ends, replaces = [], []

    def report(_, ending, rank, *, replace=False):
        ends.append((ending, rank))
        replaces.append(replace)

    monkeypatch.setattr(supervisor, "report_ending", report)
    cfg = OmegaConf.create({"launcher": {"timeout_s": 7.0}, "run_dir": str(tmp_path)})
    ends_of_ranks = [SimpleNamespace(exitcode=0, pid=1), SimpleNamespace(exitcode=code, pid=2)]
    ranks = [SimpleNamespace(is_alive=lambda: False, **vars(end)) for end in ends_of_ranks]
    supervisor.watch(cfg, ranks, StopFlag(), tmp_path)
    ((ending, which),) = ends
    assert (ending.cause, ending.code, which) == (cause, 70, 1)
    assert ending.line.startswith(f"error: rank 1 {'(process 2)' if code < 0 else 'ended'} ")
    assert replaces == [code < 0]  # another rank may have reported that it lost the killed rank
    assert ("memory ran out" in ending.line) == (code == -9)  # the kernel kills with SIGKILL
    assert supervisor.job_code(cfg, ranks) == 70
    write_status(tmp_path, cause="nonfinite", exit_code=79, rank=1)
    assert supervisor.job_code(cfg, ranks) == 79  # the code of the rank that failed first


def sleep_until_terminated() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(60)


def test_other_ranks_are_stopped_at_once_when_one_rank_was_preempted(tmp_path):
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


@pytest.mark.parametrize("phase", ["save", "mirror"])
def test_after_a_request_to_stop_the_supervisor_waits_for_a_save_and_for_its_copy(
    tmp_path, monkeypatch, phase
):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.1)
    cfg = OmegaConf.create({"launcher": {"timeout_s": 60.0}, "run_dir": str(tmp_path)})
    write_status(tmp_path, cause="preempted", exit_code=75, rank=0)
    Heartbeat(tmp_path, 1).beat(4, phase)
    stopped, saving = (
        FORK.Process(target=target, args=(number,))
        for target, number in ((os._exit, 75), (time.sleep, 0.6))
    )
    with block_stop_signals():  # the save is not ended by the request to stop
        stopped.start()
        saving.start()
    try:
        supervisor.watch(cfg, [stopped, saving], StopFlag(), tmp_path)
        assert (stopped.exitcode, saving.exitcode) == (75, 0)
    finally:
        saving.kill()
        saving.join()


def test_after_a_rank_was_killed_the_supervisor_does_not_wait_for_a_save(tmp_path, monkeypatch):
    """The save needs the killed rank, so it never ends."""
    monkeypatch.setattr(supervisor, "GRACE_S", 0.1)
    monkeypatch.setattr(supervisor, "report_ending", lambda *_, **__: None)
    cfg = OmegaConf.create({"launcher": {"timeout_s": 60.0}, "run_dir": str(tmp_path)})
    Heartbeat(tmp_path, 1).beat(4, "save")
    killed, saving = (
        FORK.Process(target=target, args=(number,))
        for target, number in ((signal.raise_signal, signal.SIGKILL), (time.sleep, 30))
    )
    for rank in (killed, saving):
        rank.start()
    try:
        supervisor.watch(cfg, [killed, saving], StopFlag(), tmp_path)
        assert saving.is_alive()
    finally:
        saving.kill()
        saving.join()
        killed.join()


@pytest.mark.parametrize("is_asked_to_stop, n_starts", [(False, 3), (True, 1)])
def test_a_lost_rank_is_worth_a_restart_unless_the_job_was_asked_to_stop(
    tmp_path, monkeypatch, caplog, is_asked_to_stop, n_starts
):
    """Each restart has the config that was prepared for it."""
    starts, stop = [], StopFlag()
    if is_asked_to_stop:
        stop.set("a person")
    monkeypatch.setattr(supervisor, "run_once", lambda _, cfg, *__: starts.append(cfg) or 70)
    write_status(tmp_path, cause="killed", exit_code=70, message="error: rank 1 was killed")
    values = {"launcher": {"max_restarts": 2}, "task": "fit", "ckpt_path": None}
    cfg = OmegaConf.create({**values, "run_dir": str(tmp_path)})
    prepared = OmegaConf.create({**cfg, "ckpt_path": "last"})
    with pytest.raises(JobFailedError) as failed:
        supervisor.supervise(sleep_until_terminated, cfg, 2, lambda: prepared, stop)
    assert (failed.value.code, failed.value.message) == (70, "error: rank 1 was killed")
    assert starts == [cfg, prepared, prepared][:n_starts]
    lines = [f"warning: started again, {left} more times at most" for left in (1, 0)]
    assert caplog.messages == lines[: n_starts - 1]


def test_a_job_of_several_ranks_returns_the_metrics_of_its_result(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "run_once", lambda *_: 0)
    (tmp_path / "result.json").write_text('{"metrics": {"val/loss": 2.5}, "steps": 7}')
    cfg = OmegaConf.create({"launcher": {"max_restarts": 0}, "run_dir": str(tmp_path)})
    metrics = supervisor.supervise(sleep_until_terminated, cfg, 2, lambda: cfg, StopFlag())
    assert metrics == {"val/loss": 2.5}


def test_time_in_which_the_watching_process_was_stopped_is_not_silence(monkeypatch):
    """Ctrl-Z and fg stop and continue the process."""
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    watch = StallWatch(lambda: [Progress(0, 7, "train", 3)], timeout_s=3.0)
    assert watch.silent_ranks() == []
    now_s = 4000.0
    assert watch.silent_ranks() == []
    now_s = 4001.5
    assert watch.silent_ranks() == [Progress(0, 7, "train", 3)]


def test_a_rank_that_is_done_is_not_missed_and_no_longer_watched(tmp_path):
    with Guard(tmp_path, tmp_path / "beats", StopFlag(), rank=0, timeout_s=60) as guard:
        guard.heartbeat.beat(9, "forward")
        threads = threading.active_count()
        assert read_progress(tmp_path / "beats") == [Progress(0, 2, "forward", 9)]
    assert threading.active_count() == threads - 1 and read_progress(tmp_path / "beats") == []


def test_a_rank_that_makes_progress_at_the_last_moment_is_not_ended(tmp_path, monkeypatch):
    """The main thread sends a heartbeat while the watchdog reads the heartbeats of all ranks."""
    n_reads, ends = [], []

    def read_late(folder):
        guard.heartbeat.beat()
        n_reads.append(1)
        return []

    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "read_progress", read_late)
    monkeypatch.setattr(os, "_exit", ends.append)
    with Guard(tmp_path, tmp_path / "beats", StopFlag(), rank=0, timeout_s=0.05) as guard:
        wait_until(lambda: len(n_reads) > 1, 30)
    assert read_status(tmp_path) is None and not ends


def test_a_heartbeat_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("content")
    (tmp_path / "rank-00000").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        Heartbeat(tmp_path, 0)
    assert (tmp_path / "victim").read_text() == "content"

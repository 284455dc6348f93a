"""Two processes over gloo: one run, whichever launcher started them.

Spawned ones, as a person's are, start in test_project.py and test_signals_run.py.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from omegaconf import OmegaConf

from gptrain.assemble.run import build
from gptrain.checkpoints.json_lines import read_json_lines
from gptrain.checkpoints.status import PreemptedError, read_status, write_status
from gptrain.core.errors import ending_of
from gptrain.parallel import rendezvous
from gptrain.parallel.rendezvous import MissingRanksError, open_store
from gptrain.runtime.agreement import all_agree
from gptrain.runtime.process import attempt_folder
from gptrain.runtime.signals import StopFlag
from gptrain.runtime.supervisor import job_code
from gptrain.runtime.watchdog import Guard
from tests.command_line import compose_run
from tests.conftest import ROOT, TINY
from tests.processes import wait_until

LOGGED = ("logger=none", "trainer.log_every_n_steps=1", "data.global_batch_size=8")


def one_log_and_no_traces_of_other_ranks(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"train.log", "result.json", "status.json", ".hydra", "checkpoints"} <= names
    assert not [name for name in names if "rank" in name or "process" in name]


class Warns(Callback):
    """Logs a warning and a detail on each rank, and warns as Python does."""

    def on_fit_start(self, trainer, pl_module) -> None:
        logging.getLogger(__name__).warning("warning: of each rank")
        logging.getLogger(__name__).debug("a detail of the first rank")
        warnings.warn("of the first rank", stacklevel=1)


def test_two_ranks_write_one_log_whatever_their_folder_is_called(train):
    """The tests in tests/strategies compare the training of two ranks with one rank."""
    log = "hydra.job_logging.formatters.file.format='[${name}] %(message)s'"  # a key of the run
    warns = "+callbacks.warns._target_=tests.test_ranks.Warns"
    words = (*LOGGED, log, warns, "hydra.verbose=tests.test_ranks", "trainer.devices=2")
    two = train(*words, name="two words = ä")
    assert two.code == 0, two.err
    assert "warning:" not in two.err and two.err.count("UserWarning: of the first rank") == 1
    one_log_and_no_traces_of_other_ranks(two.folder)
    labels = [line.split()[0] for line in two.out.splitlines()]
    names = ["model", "strategy", "batch", "plan", "run", "warning:", "result", "next"]
    assert labels == names  # the other rank logs errors only
    lines = (two.folder / "train.log").read_text().splitlines()
    assert "[train] a detail of the first rank" in lines  # not on the terminal
    assert len(lines) == len(labels) + 1 and all(line.startswith("[train] ") for line in lines)
    phases = [row.get("phase") for row in read_json_lines(two.folder / "timeline.jsonl")]
    assert phases.count("starting") == 1  # the first rank alone records its times


@pytest.mark.parametrize("steps, is_agreed", [((5, 5), True), ((5, 6), False)])
def test_ranks_that_fail_after_different_steps_do_not_agree(tmp_path, steps, is_agreed):
    """Each rank gets the same answer, and only ranks with equal values save together."""
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(all_agree, tmp_path, n, 2, [steps[n]], 60.0) for n in range(2)]
        assert [call.result() for call in calls] == [is_agreed, is_agreed]


def test_a_rank_that_fails_too_late_gets_the_answer_of_those_that_have_waited(tmp_path):
    answers = [all_agree(tmp_path, rank, 2, [5], wait_s) for rank, wait_s in ((0, 0.1), (1, 60.0))]
    assert answers == [False, False]


def test_a_job_ends_with_the_code_of_the_rank_that_failed_first(tmp_path):
    """Rank 1 failed first and wrote the status. Rank 0 lost its peer and ended with code 70."""
    cfg = OmegaConf.create({"run_dir": str(tmp_path)})
    ranks = [SimpleNamespace(exitcode=code) for code in (0, 1, 79, 65, -9)]
    assert job_code(cfg, ranks) == 79  # without a status: the first code that Python has not given
    write_status(tmp_path, cause="data", exit_code=65, rank=1)
    assert job_code(cfg, ranks) == 65


@pytest.mark.slow
def test_torchrun_makes_one_folder_and_one_set_of_lines_from_any_folder(command, tmp_path):
    (tmp_path / "anywhere").mkdir()
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    # There is no checkpoint yet, so `last` means none. Rank 0 decides it for all ranks.
    options = [f"output_dir={tmp_path}", *TINY, "trainer.devices=2", *LOGGED, "ckpt_path=last"]
    run = command(*torchrun, str(ROOT / "train.py"), *options, cwd=tmp_path / "anywhere")
    assert run.returncode == 0, run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()].count("model") == 1
    (folder,) = (tmp_path / "train").iterdir()
    one_log_and_no_traces_of_other_ranks(folder)
    assert not list((tmp_path / "anywhere").iterdir())


ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "FREE"}
# What one rank alone finds in its environment -> what its one line says.
ALONE = {
    "another node": (
        ADDRESS | {"RANK": "0"},
        "RANK=0 WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=FREE:"
        " ranks 1, 2 of 3 did not connect within 0.2 s; try: start all ranks, or: unset RANK",
    ),
    "rank 0": (
        ADDRESS | {"RANK": "1"},
        "RANK=1 WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=FREE:"
        " rank 0 did not answer within 0.2 s (Connection refused)",
    ),
    "unknown host": (
        ADDRESS | {"RANK": "1", "MASTER_ADDR": "no-such-host.invalid"},
        "MASTER_ADDR=no-such-host.invalid was not found within",
    ),
    "no domain name": (
        ADDRESS | {"RANK": "1", "MASTER_ADDR": "a..b"},
        "MASTER_ADDR=a..b was not found within 0.2 s (",
    ),
    "no address": ({"RANK": "1"}, "RANK=1 WORLD_SIZE=3: MASTER_ADDR and MASTER_PORT must be"),
    "no port": (ADDRESS | {"RANK": "0", "MASTER_PORT": "x"}, "MASTER_PORT=x: MASTER_ADDR and"),
    "port taken": (
        ADDRESS | {"RANK": "0", "MASTER_PORT": "TAKEN"},
        "MASTER_PORT=TAKEN of this host cannot be used by rank 0: taken by another process; "
        "try: another MASTER_PORT, the same in all ranks",
    ),
    "port of a server that has just ended": (
        ADDRESS | {"RANK": "0", "MASTER_PORT": "CLOSED"},
        "MASTER_PORT=CLOSED: ranks 1, 2 of 3 did not connect within 0.2 s",
    ),
    "port 0": (
        ADDRESS | {"RANK": "0", "MASTER_PORT": "0"},
        "MASTER_PORT=0 is not a port number; allowed: 1 to 65535",
    ),
    "port too large": (
        ADDRESS | {"RANK": "1", "MASTER_PORT": "65536"},
        "MASTER_PORT=65536 is not a port number; allowed: 1 to 65535",
    ),
}


def close_server_with_a_client() -> int:
    """Return the port of a closed server, for which the system still waits (TIME_WAIT)."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("localhost", port)):
            server.accept()[0].close()
    return port


@pytest.mark.parametrize("case", ALONE)
def test_ranks_that_do_not_come_together_are_one_line_and_one_code(case, monkeypatch):
    variables, message = ALONE[case]
    with socket.create_server(("", 0)) as taken, socket.create_server(("", 0)) as free:
        ports = {"TAKEN": str(taken.getsockname()[1]), "FREE": str(free.getsockname()[1])}
        free.close()
        if case == "port of a server that has just ended":
            ports["CLOSED"] = str(close_server_with_a_client())
        for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"WORLD_SIZE": "3", **variables}.items():
            monkeypatch.setenv(name, ports.get(value, value))
        with pytest.raises(MissingRanksError) as caught:
            open_store(int(variables["RANK"]), 3, 0.2, variables=("RANK", "WORLD_SIZE"))
    ending = ending_of(caught.value)
    for name, port in ports.items():
        message = message.replace(name, port)
    assert message in ending.line and "\n" not in ending.line
    assert (ending.code, ending.cause, ending.trace) == (76, "hang", "")


def test_of_many_missing_ranks_eight_are_named_and_one_reminder_is_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "REMINDER_S", 0.0)
    ranks = "ranks 1, 2, 3, 4, 5, 6, 7, 8, … of 12"
    with (
        pytest.warns(UserWarning, match=f"RANK=0: waiting up to 0.1 s for {ranks}") as warned,
        pytest.raises(MissingRanksError, match=f"^RANK=0: {ranks} did not connect within 0.1 s;"),
    ):
        monkeypatch.setenv("RANK", "0")
        open_store(0, 12, 0.1, str(tmp_path / "store"), ("RANK",))
    assert len(warned) == 1
    monkeypatch.setattr(rendezvous, "REMINDER_S", 30.0)
    with pytest.raises(MissingRanksError, match=r"ranks 1, 2, 3, 4, 5, 6, 7, 8 of 9 did"):
        open_store(0, 9, 0.01, str(tmp_path / "store of nine"), ("RANK",))


def test_a_rank_whose_rank_0_leaves_names_all_that_are_missing(monkeypatch):
    """Rank 0 leaves when rank 1 has connected. Rank 2 has not begun."""
    server = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    held = [server]

    def leave():
        wait_until(lambda: held[0].check(["rank 1 is here"]), 60)
        held.clear()

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    del server
    leaving = Thread(target=leave)
    leaving.start()
    with pytest.raises(MissingRanksError, match=r": ranks 0, 2 of 3 did not connect within 60 s;"):
        open_store(1, 3, 60.0)
    leaving.join()


def test_a_rank_waits_for_the_store_of_torchrun_no_longer_than_its_limit(monkeypatch):
    """The error of torch is passed on."""
    rendezvous_of_torch = torch.distributed.rendezvous

    def with_limit(*words, timeout):  # the default of torch is half an hour
        assert timeout == timedelta(seconds=0.3)
        return rendezvous_of_torch(*words, timeout=timeout)

    monkeypatch.setattr(torch.distributed, "rendezvous", with_limit)
    with socket.create_server(("localhost", 0)) as closed:
        port = closed.getsockname()[1]
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    variables |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(torch.distributed.DistNetworkError, match=f"{port}"):
        open_store(1, 2, 0.3)


ALONE_OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_a_rank_that_no_other_rank_joins_ends_in_one_line(command, tmp_path):
    options = ("trainer.devices=2", "strategy.timeout_s=1", "launcher.timeout_s=1")
    words = (*TINY, *options, f"run_dir={tmp_path / 'run'}")
    run = command("train.py", *words, env=os.environ | ALONE_OF_TWO)
    assert run.returncode == 76
    (line,) = run.stderr.splitlines()
    assert line.startswith(
        "error: RANK=0 WORLD_SIZE=2: rank 1 of 2 did not connect within 1 s; try: "
    )
    assert read_status(tmp_path / "run")["cause"] == "hang"


def test_a_request_to_stop_ends_the_wait_for_a_rank_that_never_comes(tmp_path, monkeypatch):
    # An earlier test of this process may have made a group.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for name, value in ALONE_OF_TWO.items():
        monkeypatch.setenv(name, value)
    cfg = compose_run(*TINY, "trainer.devices=2", "strategy.timeout_s=9", f"run_dir={tmp_path}")
    guard = Guard(tmp_path, attempt_folder(tmp_path), StopFlag(), rank=0, timeout_s=100)

    def stop() -> None:
        wait_until(lambda: guard.heartbeat.progress.phase == "connect", timeout_s=60)
        os.kill(os.getpid(), signal.SIGTERM)

    with guard.stop, guard:
        Thread(target=stop, daemon=True).start()
        with pytest.raises(PreemptedError):
            build(cfg, guard)

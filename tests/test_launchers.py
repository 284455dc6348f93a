"""Each program that starts ranks makes the same run as two devices of one process, and ends.

MPICH can be installed together with Open MPI. torchrun is tested in test_ranks.py, and on two nodes
in test_nodes.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import accepted, refused

from gptrain.runtime import process
from gptrain.runtime.process import (
    Process,
    attempt_folder,
    store_path,
    this_process,
)
from tests.conftest import ROOT, TINY, Finished

WORDS = (*TINY, "data.global_batch_size=8", "trainer.devices=2", "logger=none")
OPEN_MPI = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2")
# With --cpu it starts one process, whatever was asked for.
ACCELERATE = (
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2",
    "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no",
)  # fmt: skip
A_SHELL_AROUND_EACH = (*OPEN_MPI, "sh", "-c", '"$0" "$@"; exit $?', sys.executable)
STARTED = [
    pytest.param(ACCELERATE, id="accelerate", marks=pytest.mark.engine("accelerate")),
    pytest.param(A_SHELL_AROUND_EACH, id="openmpi, a shell around each"),
    pytest.param(("mpiexec.mpich", "-n", "2", sys.executable), id="mpich"),
]


def start(folder: Path, *command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = (*command, str(ROOT / "train.py"), *WORDS, f"output_dir={folder}")
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def loss_by_itself(train, tmp_path_factory) -> float:
    """val/loss of the run that gptrain starts. It is trained once for all tests."""
    kept = tmp_path_factory.getbasetemp() / "loss_by_itself"
    if not kept.exists():
        run = train(*WORDS, tiny=False)
        assert run.code == 0, run.err
        kept.write_text(repr(run.metrics["val/loss"]))
    return float(kept.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("command", STARTED)
def test_a_launcher_gives_one_run_with_the_same_loss(command, loss_by_itself, tmp_path):
    if not shutil.which(command[0]):
        pytest.skip(f"no {command[0]} on this machine")
    run = start(tmp_path, *command)
    assert run.returncode == 0, run.stderr
    (folder,) = (tmp_path / "train").iterdir()  # all processes write into the same run folder
    assert Finished(0, "", "", folder).metrics["val/loss"] == loss_by_itself
    assert [line.split()[0] for line in run.stdout.splitlines()].count("result") == 1


WHERE = """
from gptrain.runtime.process import *
with open(f"rank{this_process().rank}", "w") as file:
    print(this_process(), run_stamp(), attempt(), sep="\\n", file=file)
"""


@pytest.mark.engine("accelerate")
def test_accelerate_starts_ranks_as_torchrun_does(tmp_path):
    (tmp_path / "script.py").write_text(WHERE)
    subprocess.run([*ACCELERATE, "script.py"], cwd=tmp_path, check=True)
    outputs = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1)]
    places = [Process("torchrun", rank, rank, world_size=2) for rank in (0, 1)]
    assert [place for place, *_ in outputs] == [*map(str, places)]
    assert outputs[0][1:] == outputs[1][1:]  # the run's folder, and where they meet


@pytest.mark.slow
def test_a_rank_that_fails_ends_what_mpirun_started_with_its_code(tmp_path):
    if not shutil.which("mpirun"):
        pytest.skip("no mpirun on this machine")
    run = start(tmp_path, *OPEN_MPI, sys.executable, "-c", DIES, str(ROOT / "conf"))
    assert run.returncode == 65, run.stderr


DIES = """
import sys, time
conf, *sys.argv = sys.argv[1:]
from gptrain import runtime
from gptrain import config
from gptrain.runtime.process import this_process
from gptrain.core.errors import DataError

def train(cfg, guard):
    if this_process().rank == 1:
        raise DataError("the other one waits")
    time.sleep(100)

config.main(lambda cfg: runtime.run(train, cfg, lambda *_: None), conf=conf)
"""


@pytest.mark.parametrize("launcher", ["torchrun", "openmpi", "mpich"])
def test_a_rank_knows_its_place(launcher, launched, monkeypatch):
    launched(launcher, 5, 8, 1, 4)
    assert this_process() == Process(launcher, rank=5, local_rank=1, world_size=8, n_nodes=2)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert store_path("/runs/a") is None
    launched(launcher, 1, 4, 1, 4)  # ranks of one node use a file, whatever address is set
    assert store_path("/runs/a") == str(attempt_folder("/runs/a") / "store")


def test_srun_with_pmi_is_srun_and_what_mpi_starts_on_slurms_nodes_is_mpis(launched, monkeypatch):
    launched("slurm", 1, 2, 0)
    launched("mpich", 1, 2)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    assert this_process() == Process("slurm", rank=1, local_rank=0, world_size=2, n_nodes=2)
    launched("openmpi", 5, 8, 1, 4)  # srun starts a daemon of Open MPI on each node
    assert this_process().launcher == "openmpi"


def test_a_single_process_of_mpirun_starts_ranks_itself(launched):
    launched("openmpi", 0, 1, 0, 1)
    assert not this_process().is_rank


def test_a_rank_number_without_a_launcher_is_no_rank(monkeypatch):
    """Some clusters set RANK=0, or the number of nodes as WORLD_SIZE, for every process."""
    for variables in ({"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "", "WORLD_SIZE": ""}):
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert not this_process().is_rank


def test_mpirun_on_two_nodes_needs_master_addr(launched, monkeypatch, tmp_path):
    launched("openmpi", 0, 4, 0, 2)
    words = ("trainer.devices=2", "trainer.num_nodes=auto", "trainer.accelerator=cpu")
    (line,) = refused(*words, f"run_dir={tmp_path / 'seen_by_all'}")
    assert line.startswith("error: MASTER_ADDR: not set") and "mpirun -x MASTER_ADDR=" in line
    monkeypatch.setenv("MASTER_ADDR", "a")
    assert accepted(*words, f"run_dir={tmp_path / 'seen_by_all'}") == []


def test_a_shell_around_each_rank_is_not_its_launcher(launched, monkeypatch):
    """Both ranks name the folder, and where they meet, by what started the shells."""
    asked = "from gptrain.runtime.process import *; print(run_stamp(), attempt())"
    launched("openmpi", 0, 2, 0, 2)
    alone = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    command = f"{shlex.quote(sys.executable)} -c '{asked}'; exit $?"
    shells = ["sh", "-c", f"sh -c {shlex.quote(command)}; exit $?"]
    inside = subprocess.run(shells, capture_output=True, text=True)
    assert alone.stdout == inside.stdout != ""
    monkeypatch.setattr(process, "launcher_start", lambda: 1.7e9 + 0.0078125)
    assert process.run_stamp().endswith("-007")  # names of folders sort by time

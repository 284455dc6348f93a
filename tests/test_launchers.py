"""Each program that starts ranks makes the same run as two devices of one process, and ends.

MPICH can be installed together with Open MPI. torchrun is tested in test_ranks.py, and on two nodes
in test_nodes.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gptrain.runtime.process import Process, adopt_launcher, this_process
from tests.conftest import ROOT, TINY
from tests.run import Run
from tests.run import train as run_train

WORDS = (*TINY, "data.global_batch_size=8", "trainer.devices=2", "logger=none")
OPEN_MPI = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2")
# With --cpu it starts one process, whatever was asked for.
ACCELERATE = (
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2",
    "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no",
)  # fmt: skip
A_SHELL_AROUND_EACH = (*OPEN_MPI, "sh", "-c", '"$0" "$@"; exit $?', sys.executable)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
STARTED = [
    pytest.param(ACCELERATE, id="accelerate", marks=pytest.mark.engine("accelerate")),
    pytest.param(A_SHELL_AROUND_EACH, id="openmpi, a shell around each"),
    pytest.param(("mpiexec.mpich", "-n", "2", sys.executable), id="mpich"),
]


def start(folder: Path, *command: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = (*command, str(ROOT / "train.py"), *WORDS, f"output_dir={folder}", *words)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", STARTED)
def test_a_launcher_gives_one_run_with_the_same_loss(command, tmp_path):
    if not shutil.which(command[0]):
        pytest.skip(f"no {command[0]} on this machine")
    run = start(tmp_path, *command)
    assert run.returncode == 0, run.stderr
    (folder,) = (tmp_path / "train").iterdir()  # all processes write into the same run folder
    by_itself = run_train(*WORDS)
    assert Run(folder, 0, "", "").metrics["val/loss"] == by_itself.metrics["val/loss"]
    assert [line.split()[0] for line in run.stdout.splitlines()].count("result") == 1


@pytest.mark.slow
def test_torchrun_restarts_a_run_in_the_folder_that_it_has_chosen(tmp_path):
    """Rank 1 is killed once. The run has no `run_dir`, and goes on from its newest checkpoint."""
    fault = (
        "+callbacks.fault={_target_: tests.tools.campaign.faults.Fault, act: SIGKILL, phase: log, "
        "rank: 1, step: 3, target: rank, operation: 0, always: false}"
    )
    words = ("checkpoint=every_n_steps", "checkpoint.every_n_steps=1", "trainer.max_steps=6")
    run = start(tmp_path, *TORCHRUN, "--max-restarts=1", words=(*words, fault))
    assert run.returncode == 0, run.stderr
    (folder,) = (tmp_path / "train").iterdir()
    assert "resume    from step" in run.stdout and (folder / "result.json").exists()


OPENMPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
TASK = {  # environment of the last task of `srun --ntasks=4 --nodes=2` in SLURM 22.05
    "SLURM_JOB_ID": "40015", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3",
}  # fmt: skip


@pytest.fixture
def adopted(monkeypatch):
    """Return a function that adopts these variables of a launcher and returns the environment."""
    environment = dict(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
        environment.pop(name, None)

    def adopt(**variables: str) -> dict[str, str]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        environment.update(variables)
        adopt_launcher()
        return environment

    return adopt


@pytest.mark.parametrize("names", [OPENMPI, MPICH])
def test_a_rank_of_mpi_knows_its_place(names, adopted):
    environment = adopted(**dict(zip(names, "5814", strict=True)))
    assert this_process() == Process(5, local_rank=1, world_size=8, n_nodes=2, is_rank=True)
    assert "MASTER_ADDR" not in environment  # the user names the first node
    environment = adopted(**dict(zip(names, "1212", strict=True)))
    assert this_process() == Process(1, local_rank=1, world_size=2, is_rank=True)
    assert environment["MASTER_ADDR"] == "localhost"


# Some clusters set RANK=0, or the number of nodes as WORLD_SIZE, for every process.
ALONE = ({"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "", "WORLD_SIZE": ""})


@pytest.mark.parametrize("variables", [*ALONE, dict(zip(MPICH, "0101", strict=True))])
def test_one_process_is_no_rank(variables, adopted):
    adopted(**variables)
    assert not this_process().is_rank


def test_a_task_of_srun_has_a_place_an_address_a_folder_and_threads(adopted):
    environment = adopted(**TASK, PMI_RANK="3", PMI_SIZE="4")  # srun --mpi=pmi2
    assert this_process() == Process(3, local_rank=1, world_size=4, n_nodes=2, is_rank=True)
    assert environment["MASTER_ADDR"] == "gpu003" and environment["MASTER_PORT"].isdigit()
    assert environment["OMP_NUM_THREADS"] == "3" and environment["GPTRAIN_JOB"] == "slurm-40015"
    array = {"SLURM_ARRAY_JOB_ID": "40010", "SLURM_ARRAY_TASK_ID": "5", "SLURM_STEP_ID": "2"}
    adopted(**TASK | array)
    assert environment["GPTRAIN_JOB"] == "slurm-40010_5.2"
    adopted(**TASK, **dict(zip(OPENMPI, "5814", strict=True)))  # srun starts a daemon of Open MPI
    assert this_process().world_size == 8

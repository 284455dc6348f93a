"""Each program that starts ranks makes the same run as two devices of one process, and ends.

MPICH can be installed together with Open MPI. torchrun is tested in test_ranks.py, and on two nodes
in test_nodes.py. What the variables of each are translated to is in tests/golden/accepted.json.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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

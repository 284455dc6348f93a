"""The recipe slurm.sh on a real SLURM (Debian: apt-get install slurm-wlm munge).

All jobs are submitted at once, each to nodes where it disturbs no other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from tests.conftest import TINY
from tests.processes import wait_until
from tests.run import Run, same
from tests.slurm_cluster import Cluster, missing_programs, running_cluster

NO_SLURM = bool(missing_programs())
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine("submitit"),  # all tests share one cluster, whose start takes long
    pytest.mark.skipif(NO_SLURM, reason="no SLURM: apt-get install slurm-wlm munge"),
]
STEPS = 12
START_S = 120  # time limit for the start of a job while three other jobs run
RUN = (*TINY, "logger=none", "model.dropout=0.1", f"trainer.max_steps={STEPS}",
       "trainer.log_every_n_steps=1")  # fmt: skip
TWO_NODES = (*RUN, "trainer.num_nodes=2")
CAUGHT = ("+callbacks.paced={_target_: tests.test_slurm_cluster.Paced}", "checkpoint=every_n_steps",
          "checkpoint.every_n_steps=2")  # fmt: skip


class Paced(Callback):
    """Gives the first start of a job long steps, so that it can be interrupted."""

    def on_train_batch_start(self, *_: object) -> None:
        if not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            time.sleep(0.5)


class Jobs:
    """Jobs that all tests of this file share."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        launcher = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=main")
        sweep = ("-m", "optimizer.lr=1e-3,3e-4,1e-4", f"run_dir={cluster.outputs}/sweep")
        self.sweep = cluster.start(sys.executable, "train.py", *RUN, *sweep, *launcher)
        self.plain = {
            name: cluster.submit(*TWO_NODES, f"strategy={name}", n_nodes=2)
            for name in ("ddp", "fsdp")
        }
        self.cheap = cluster.submit(*TWO_NODES, *CAUGHT, n_nodes=2, partition="cheap")
        self.cancelled = cluster.submit(*RUN, *CAUGHT, "trainer.max_steps=1000")
        self.saved(self.cheap)
        dear = ("--partition=dear", "--nodes=2", "--exclusive", "--output=/dev/null")
        cluster.run("sbatch", *dear, "--wrap=sleep 1")  # preempts the job
        self.saved(self.cancelled)
        cluster.run("scancel", self.cancelled)

    def folder(self, job: str) -> Path:
        return self.cluster.outputs / f"slurm-{job}"

    def finished(self, job: str) -> Run:
        """Wait until the run of a job is done, and return it."""
        folder = self.folder(job)

        def about() -> str:
            queue = self.cluster.run("squeue", "--long")
            return f"{queue}\n{self.cluster.log(folder)}"

        wait_until((folder / "result.json").exists, START_S, about)
        return Run(folder, 0, self.cluster.log(folder), "")

    def saved(self, job: str) -> None:
        """Wait until the run of a job has saved a checkpoint."""
        folder = self.folder(job)
        about = lambda: self.cluster.log(folder)  # noqa: E731
        wait_until(lambda: any(folder.glob("checkpoints/step-*/manifest.json")), START_S, about)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with running_cluster(folder) as cluster:
        yield Jobs(cluster)


def test_a_preempted_job_saves_is_requeued_and_resumes_bit_for_bit(jobs):
    run = jobs.finished(jobs.cheap)
    assert "asked to stop: saved at step" in run.out and "resume    from step" in run.out
    states = run.state(STEPS), jobs.finished(jobs.plain["ddp"]).state(STEPS)
    assert not same(*({key: state[key] for key in ("weights", "optimizer")} for state in states))


def test_a_cancelled_job_saves_and_is_not_started_again(jobs):
    folder = jobs.folder(jobs.cancelled)
    wait_until((folder / "status.json").exists, START_S, lambda: jobs.cluster.log(folder))
    status = json.loads((folder / "status.json").read_text())
    assert (status["exit_code"], status["cause"]) == (75, "preempted")
    wait_until(lambda: not jobs.cluster.is_queued(jobs.cancelled), START_S)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_nodes_train_as_one_machine_does(jobs, train, strategy):
    here = train(*RUN, f"strategy={strategy}", "trainer.devices=2", tiny=False)
    assert here.code == 0, here.err
    there = jobs.finished(jobs.plain[strategy])
    assert there.column("train/loss") == pytest.approx(here.column("train/loss"), rel=1e-5)
    assert there.metrics["val/loss"] == pytest.approx(here.metrics["val/loss"], rel=1e-5)


def test_a_sweep_of_three_runs_as_three_jobs(jobs):
    output, _ = jobs.sweep.communicate(timeout=120)
    assert jobs.sweep.returncode == 0, output
    results = (jobs.cluster.outputs / "sweep").glob("*/result.json")
    assert len({json.loads(path.read_text())["metrics"]["val/loss"] for path in results}) == 3


def test_the_queue_is_empty_after_all_that(jobs):
    wait_until(lambda: not jobs.cluster.run("squeue", "--noheader"), 20)

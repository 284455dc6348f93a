"""A sweep runs every job in a folder of its own, and one that fails takes no other with it."""

from __future__ import annotations

import csv
import json

import pytest
from omegaconf import OmegaConf

from gptrain.config.compose import job_folder
from tests.conftest import TINY


def jobs(folder):
    """Job number -> its exit code, of the jobs that left a status."""
    return {
        int(path.parent.name.partition("-")[0]): json.loads(path.read_text())["exit_code"]
        for path in folder.glob("*/status.json")
    }


def result(job):
    return json.loads((job / "result.json").read_text())


def test_a_sweep_runs_a_job_again_only_where_its_result_is_missing(train):
    words = ("-m", "seed=1,2", "trainer.max_steps=1", "ckpt_path=last")
    sweep = train(*words)
    assert sweep.code == 0 and jobs(sweep.folder) == {0: 0, 1: 0}, sweep.err
    folders = [sweep.folder / name for name in ("0-seed_1", "1-seed_2")]
    assert "batch " in (folders[0] / "train.log").read_text()
    before = [result(folder)["seconds"] for folder in folders]
    for name in ("result.json", "status.json"):
        (folders[1] / name).unlink()
    again = train(*words)
    assert again.code == 0, again.err
    after = [result(folder)["seconds"] for folder in folders]
    assert after[0] == before[0] and after[1] != before[1]


@pytest.mark.parametrize(
    ("varied", "name"),
    [
        ("", "3"),
        ("model=gpt_nano,optimizer.lr=1.2345678e-05", "3-model_gpt_nano-lr_1.2345678e-05"),
        ("+callbacks.a@b.c=x y,data.path=['/a/b','c']", "3-c_x-y-path_-a-b-c"),
        ("x=-1," + 90 * "y", "3-x_-1-" + 73 * "y"),
    ],
)
def test_a_jobs_folder_is_short_and_needs_no_quotes(varied, name):
    assert job_folder(3, varied) == name and len(name) <= 80


def test_a_failing_job_is_reported_and_the_others_run(train):
    """A point that failed has no result to read: it is tried again. An early stop is no failure."""
    words = (
        "trainer.gradient_clip_val=null", "trainer.max_steps=9", "trainer.val_check_interval=3",
        "+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss,"
        " divergence_threshold: 0.1}", "logger=none",
    )  # fmt: skip
    sweep = train("-m", "optimizer.lr=1e-3,1e30,-1", *words)
    assert sweep.code == 79  # the code of the first job that failed
    assert jobs(sweep.folder) == {0: 0, 1: 79, 2: 2}
    assert "error: optimizer.lr=-1: " in sweep.err
    table = list(csv.DictReader((sweep.folder / "results.csv").open(newline="")))
    early, failed, refused = table
    assert early["ended"].startswith("early stop: at step 3: ") and early["ended"] in sweep.out
    assert failed["ended"].startswith("nonfinite: step") and failed["ended"] in sweep.out
    assert (failed["run"], refused["optimizer.lr"]) == ("1-lr_1e+30", "-1")
    assert refused["ended"].startswith("refused: optimizer.lr=-1: ")


@pytest.mark.engine("optuna")
def test_optuna_gets_the_objective_and_repeats_itself(train):
    words = ("hydra.sweeper.n_trials=3", "trainer.max_steps=2", "trainer.limit_val_batches=0",
             "objective=grad_norm", "checkpoint.mode=max", "checkpoint=none")  # fmt: skip

    def search(name):
        run = train("-m", "hparams_search=optuna", *words, name=name)
        assert run.code == 0, run.err
        results = [json.loads(path.read_text()) for path in run.folder.glob("*/result.json")]
        norms = [result["metrics"]["grad_norm"] for result in results]
        return OmegaConf.load(run.folder / "optimization_results.yaml"), norms

    first, norms = search("first")
    assert len(set(norms)) == 3 and first.best_value == max(norms)
    assert first == search("second")[0]


@pytest.mark.slow
@pytest.mark.engine("submitit")
def test_a_job_of_submitit_starts_ranks_of_its_own_and_one_that_is_refused_is_told_here(
    command, tmp_path
):
    words = ("-m", "hydra/launcher=submitit_local", "data.global_batch_size=9,8")
    ended = command("train.py", *TINY, *words, "trainer.devices=2", f"run_dir={tmp_path}/sweep")
    assert ended.returncode == 2, ended.stderr
    refusal = "data.global_batch_size=9: "
    assert f"error: {refusal}" in ended.stderr and f"refused: {refusal}" in ended.stdout
    _, done, refused = (tmp_path / "sweep" / "results.csv").read_text().splitlines()
    assert done.startswith("1-global_batch_size_8,8,") and "steps done" in done
    assert refused.startswith("0-global_batch_size_9,9,") and f"refused: {refusal}" in refused
    (job,) = (tmp_path / "sweep").glob("*/result.json")
    assert result(job.parent)["steps"] == 4

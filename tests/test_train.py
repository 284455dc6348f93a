"""A run as a user sees it: one device, its lines, its folder, its checkpoints."""

from __future__ import annotations

import shlex
import shutil

import torch

from tests.command_line import compose_command
from tests.conftest import ROOT


def test_a_result_is_kept_where_no_step_is_left(train):
    result = train().result
    again = train("ckpt_path=last")
    assert again.code == 0, again.err
    assert again.result == result


def test_a_sanity_check_leaves_no_trace_in_what_is_saved_and_logged(train):
    words = ("checkpoint=every_n_steps", "checkpoint.every_n_steps=2", "model.dropout=0.1")
    plain = train(*words, name="plain")
    checked = train(*words, "trainer.num_sanity_val_steps=2", name="checked")
    assert checked.code == 0, checked.err
    for state, plain_state in zip(checked.state(2)["rng"], plain.state(2)["rng"], strict=True):
        assert torch.equal(state["torch"], plain_state["torch"])
    logged = [run.state(4)["counters"]["logged"] for run in (checked, plain)]
    assert logged[0] == logged[1]
    assert [row["step"] for row in checked.rows] == [row["step"] for row in plain.rows]


def test_the_command_that_resumes_says_all_that_was_typed_and_needs_no_other_folder(
    train, tmp_path
):
    (tmp_path / "conf" / "scheduler").mkdir(parents=True)
    constant = ROOT / "src/gptrain/conf/scheduler/constant.yaml"
    shutil.copy(constant, tmp_path / "conf/scheduler/mine.yaml")
    timer = "+callbacks.timer={_target_: lightning.pytorch.callbacks.Timer}"
    old = train(timer, "seed=7", "trainer.max_steps=1", name="old")
    words = (f"from_run={old.folder}", "~callbacks.timer", "scheduler=mine", "model.dropout=0.1")
    words = (*words, "++ckpt_path=null")
    run = train(f"hydra.searchpath=['file://{tmp_path}/conf']", *words, tiny=False)
    assert run.code == 0, run.err
    shutil.rmtree(old.folder)
    resume = shlex.split(run.status["resume"])
    assert "++ckpt_path=null" not in resume
    cfg = compose_command(resume[2:])
    assert (cfg.seed, cfg.model.dropout, cfg.from_run, cfg.ckpt_path) == (7, 0.1, None, "last")
    assert "timer" not in cfg.callbacks and cfg.run_dir == str(run.folder)


def test_a_job_that_a_launcher_restarts_resumes_automatically(train):
    words = ("logger=none", "trainer.val_check_interval=2")
    train(*words).cut_back(2)
    again = train(*words, env={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.code == 0 and "resume    from step 2" in again.out, again.err

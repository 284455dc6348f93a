"""A run as a user sees it: one device, its lines, its folder, its checkpoints."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest
import torch

from gptrain.models import SimpleGPT
from tests.command_line import compose_command
from tests.conftest import ROOT, TINY
from tests.run import Run
from tests.run import train as run_train


@pytest.fixture
def plain() -> Run:
    """Return a run that tests only read."""
    return run_train(*TINY, "trainer.log_every_n_steps=1", "trainer.val_check_interval=2")


def test_the_result_tells_the_steps_of_this_start_and_is_kept_where_none_is_left(train):
    train("trainer.max_steps=3")
    second = train("trainer.max_steps=4", "ckpt_path=last")
    assert re.search(r"result    1 step in \d+ s, from step 3 to 4 ·", second.out)
    assert second.metrics
    third = train("trainer.max_steps=4", "ckpt_path=last")
    assert third.code == 0, third.err
    assert "nothing left to train, step 4 is the last step of the run; to train" in third.out
    assert third.result == second.result
    (second.folder / "result.json").unlink()  # like a run that was killed before it wrote a result
    again = train("trainer.max_steps=4", "ckpt_path=last").metrics
    assert again == {k: value for k, value in second.metrics.items() if "perf/" not in k}


def test_a_checkpoint_is_plain_and_loads_into_the_bare_net(plain):
    assert [path.name for path in plain.checkpoints] == ["step-00000002", "step-00000004"]
    weights = plain.state(4)["weights"]
    weights["head.weight"] = weights["token_embedding.weight"]  # a tied weight is saved once
    SimpleGPT(256, 32, 2, 2, 256, 0.0).load_state_dict(weights)


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

"""A run as a user sees it: one device, its lines, its folder, its checkpoints."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptrain.checkpoints.lock import LOST_HOST_S, RunLock
from gptrain.checkpoints.status import read_status, write_status
from gptrain.config import compose_command
from gptrain.models import SimpleGPT
from gptrain.runtime import rank
from tests.conftest import ROOT, Finished

_made: list[Finished] = []


@pytest.fixture
def plain(train) -> Finished:
    """Return a run that all tests share which only read or copy it."""
    if not _made:
        words = ("trainer.log_every_n_steps=1", "trainer.val_check_interval=2")
        _made.append(train(*words, name="plain"))
    return _made[0]


def test_result_and_status_of_a_finished_run_are_written_and_the_loss_is_ln_v(plain):
    """Dummy data is random, so that the loss stays at ln V."""
    result = json.loads((plain.folder / "result.json").read_text())
    assert result["steps"] == 4
    assert result["tokens"] == 4 * 4 * 16  # steps x sequences x positions
    assert {"val/loss", "val/perplexity", "train/loss"} <= result["metrics"].keys()
    assert "step" not in result["metrics"]  # the x axis of the loggers
    assert result["metrics"]["val/loss"] == pytest.approx(math.log(256), rel=0.02)
    status = read_status(plain.folder)
    assert (status["cause"], status["exit_code"], status["step"]) == ("done", 0, 4)


def test_the_result_tells_the_steps_of_this_start_and_is_kept_where_none_is_left(train):
    assert re.search(r"result    3 steps in \d+ s · train", train("trainer.max_steps=3").out)
    second = train("trainer.max_steps=4", "ckpt_path=last")
    assert re.search(r"result    1 step in \d+ s, from step 3 to 4 ·", second.out)
    kept = (second.folder / "result.json").read_text()
    third = train("trainer.max_steps=4", "ckpt_path=last")
    assert third.code == 0, third.err
    assert "nothing left to train, step 4 is the last step of the run; to train" in third.out
    assert (third.folder / "result.json").read_text() == kept
    (second.folder / "result.json").unlink()  # like a run that was killed before it wrote a result
    train("trainer.max_steps=4", "ckpt_path=last")
    metrics, again = (
        json.loads(text)["metrics"] for text in (kept, (second.folder / "result.json").read_text())
    )
    assert again == {name: value for name, value in metrics.items() if "perf/" not in name}


def test_tensorboard_holds_all_that_is_logged_by_the_same_names(plain):
    events = EventAccumulator(str(plain.folder))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert names == plain.rows[0].keys() - {"step"}
    for name in ("train/loss", "val/loss"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        logged = {row["step"]: row[name] for row in plain.rows if row[name] is not None}
        assert shown == pytest.approx(logged)
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_a_checkpoint_is_plain_and_loads_into_the_bare_net(plain):
    steps = sorted(path.name for path in (plain.folder / "checkpoints").iterdir())
    assert steps == ["step-00000002", "step-00000004"]
    net = SimpleGPT(256, 32, 2, 2, 256, 0.0)
    net.load_state_dict(plain.state(4)["state_dict"])


def test_fast_dev_run_goes_through_every_part_and_keeps_nothing(train):
    run = train("trainer.fast_dev_run=true")
    assert run.code == 0, run.err
    assert "test/loss" in run.out and "val/loss" in run.out
    assert not (run.folder / "checkpoints").exists()
    assert not (run.folder / "result.json").exists()
    assert not (run.folder / "timeline.jsonl").exists()
    assert not list(run.folder.glob("events*"))


def test_a_checkpoint_is_evaluated_to_the_loss_that_the_run_logged(train, plain, tmp_path):
    checkpoint = plain.folder / "checkpoints" / "step-00000004"
    (tmp_path / "run").mkdir()
    write_status(tmp_path / "run", cause="error", exit_code=70)  # of an evaluation that failed
    again = train("task=test", f"ckpt_path='{checkpoint}'", "trainer.limit_test_batches=2")
    status = read_status(again.folder)
    assert again.code == status["exit_code"] == 0, again.err
    assert f"ckpt_path={checkpoint}" in shlex.split(status["resume"])
    assert again.metrics["test/loss"] == pytest.approx(plain.metrics["val/loss"], rel=1e-6)


def test_an_evaluation_in_the_folder_of_a_run_is_refused_and_its_records_are_left_alone(train):
    run = train("logger=none", "optimizer.lr=5e-4")
    names = (".hydra/overrides.yaml", "result.json", "status.json", "metrics.jsonl")
    before = [(run.folder / name).read_text() for name in names]
    again = train("logger=none", "task=test", "ckpt_path=best")
    assert again.code == 73
    assert f"holds a trained run; try: from_run={run.folder}" in again.err
    assert [(run.folder / name).read_text() for name in names] == before
    other = train(f"from_run={run.folder}", "logger=none", "task=validate", name="other")
    assert other.metrics["val/loss"] == pytest.approx(run.metrics["val/loss"], rel=1e-6)
    assert [row["step"] for row in other.rows] == [4]  # the step that was evaluated


def test_a_sanity_check_leaves_no_trace_in_what_is_saved_and_logged(train):
    options = (
        "checkpoint=every_n_steps", "checkpoint.every_n_steps=2", "model.dropout=0.1",
    )  # fmt: skip
    plain = train(*options, name="plain")
    checked = train(*options, "trainer.num_sanity_val_steps=2", name="checked")
    assert checked.code == 0, checked.err
    for state, plain_state in zip(checked.state(2)["rng"], plain.state(2)["rng"], strict=True):
        assert torch.equal(state["torch"], plain_state["torch"])
    assert checked.state(4)["logged"] == plain.state(4)["logged"]
    assert [row["step"] for row in checked.rows] == [row["step"] for row in plain.rows]


def test_the_command_that_resumes_says_all_that_was_typed_and_needs_no_other_folder(
    train, tmp_path
):
    (tmp_path / "conf" / "scheduler").mkdir(parents=True)
    shutil.copy(
        ROOT / "src/gptrain/conf/scheduler/constant.yaml", tmp_path / "conf/scheduler/mine.yaml"
    )
    timer = "+callbacks.timer={_target_: lightning.pytorch.callbacks.Timer}"
    old = train(timer, "seed=7", "trainer.max_steps=1", name="old")
    words = (f"from_run={old.folder}", "~callbacks.timer", "scheduler=mine", "model.dropout=0.1")
    words = (*words, "++ckpt_path=null")
    run = train("--config-dir", f"{tmp_path}/conf", *words, tiny=False)
    assert run.code == 0, run.err
    shutil.rmtree(old.folder)
    resume = shlex.split(read_status(run.folder)["resume"])
    assert "++ckpt_path=null" not in resume
    cfg = compose_command(resume[2:])
    assert (cfg.seed, cfg.model.dropout, cfg.from_run, cfg.ckpt_path) == (7, 0.1, None, "last")
    assert "timer" not in cfg.callbacks and cfg.run_dir == str(run.folder)


def test_a_job_that_a_launcher_restarts_resumes_automatically(train, monkeypatch):
    options = ("logger=none", "trainer.val_check_interval=2")
    train(*options).cut_back(2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with patch.object(rank, "RunLock", wraps=RunLock) as lock:
        again = train(*options)
    assert lock.call_args.args[1] == LOST_HOST_S
    assert again.code == 0 and "resume    from step 2" in again.out, again.err


def test_a_run_too_large_for_the_memory_says_so_and_what_to_type(train):
    # A virtual limit: no page of what is asked for is ever touched.
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, limit[1]))
    try:
        run = train("data.batch_size=3000", "data.num_samples=3000", "data.seq_len=128")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert run.code == 70
    last = run.err.strip().splitlines()[-1]
    assert last.startswith("error: out of memory: ") and "bytes" in last
    assert "model.activation_checkpointing=full" in last

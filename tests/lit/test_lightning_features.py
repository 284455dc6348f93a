"""Usual Lightning features work as in any Lightning project, or are refused in one line."""

from __future__ import annotations

import shutil

import pytest
import torch

import gptrain
from tests.lit.fit import CALLBACKS, LIGHTNING, MODULES, fit
from tests.run import same

SEES = f"+callbacks.sees._target_={CALLBACKS}.SeesAll"
SEEN = (  # two tests read this run
    f"{MODULES}.Logs", f"+callbacks.mine._target_={CALLBACKS}.Logs", SEES,
    "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=3",
    "trainer.gradient_clip_val=0.5",
)  # fmt: skip


def test_logged_values_form_one_row_per_optimizer_step():
    run = fit(*SEEN)
    rows = run.rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and "epoch" not in rows[0]
    for name in ("train/loss", "train/mine", "train/both_step", "mine/batch_end", "mine/loss_step"):
        assert all(row[name] for row in rows), (name, rows)
    for name in ("val/mine", "val/loss", "mine/val"):
        assert [row["step"] for row in rows if row.get(name)] == [3, 6]
    assert rows[-1]["train/both_epoch"]  # the run ends within its epoch
    # The loss of a micro-batch, which a module sees, is its part of the loss of the step.
    mean = sum(run.column("train/loss")) / 6
    assert rows[-1]["train/epoch_mean"] == pytest.approx(mean, rel=1e-5)
    assert rows[-1]["mine/batch_end"] == 11


def test_callbacks_see_gptrains_metrics_and_the_gradients_before_the_optimizer_step():
    run = fit(*SEEN)
    for seen in run.seen:
        if seen["hook"] == "batch_end" and seen["step"] >= 1:
            assert {"train/loss", "lr", "grad_norm"} <= seen["metrics"].keys(), seen
        if seen["hook"].startswith("validation_e"):
            assert {"val/loss", "train/loss", "lr"} <= seen["metrics"].keys(), seen
    ends = [s for s in run.seen if s["hook"] == "batch_end"][1::2]
    assert [s["metrics"]["train/loss"] for s in ends] == pytest.approx(run.column("train/loss"))
    assert [s["step"] for s in ends] == [1, 2, 3, 4, 5, 6]
    assert all("loss" in s["outputs"] for s in ends)
    steps = [s for s in run.seen if s["hook"] == "before_step"]
    assert len(steps) == 6 and all(s["n_grads"] > 5 for s in steps)
    assert [s["norm"] for s in steps] == pytest.approx(run.column("grad_norm"), rel=1e-4)


@pytest.mark.parametrize("kind", ["once none", "none"])
def test_training_step_may_return_none(kind):
    run = fit(f"{MODULES}.Returns", f"+module.kind={kind}", "trainer.accumulate_grad_batches=2")
    assert run.steps[-1] == 6 and len(run.rows) == (6 if kind == "once none" else len(run.rows))


def test_gradients_computed_inside_training_step_are_not_added_to_the_steps_gradients():
    assert fit(f"{MODULES}.LooksAhead").column("grad_norm") == fit().column("grad_norm")


@pytest.mark.filterwarnings("error:To copy construct from a tensor")  # a tensor as learning rate
@pytest.mark.parametrize(
    ("kind", "lrs"),
    [("none", [0.1] * 6), ("epoch", [0.1] * 3 + [0.05] * 3), ("plateau_steps", None)],
)
def test_the_logged_lr_is_that_of_a_modules_own_optimizer_and_schedule(kind, lrs):
    # Lightning counts micro-batches where a plateau in steps has a frequency of 4.
    n_micro_steps = 2 if kind == "plateau_steps" else 1
    run = fit(
        f"{MODULES}.OwnOptimizers", f"+module.kind={kind}", SEES, "trainer.val_check_interval=3",
        f"data.num_samples={12 * n_micro_steps}",
        f"trainer.accumulate_grad_batches={n_micro_steps}", "trainer.max_epochs=9",
    )  # fmt: skip
    used = [s["lr"] for s in run.seen if s["hook"] == "before_step"]
    assert run.column("lr") == pytest.approx(used)
    assert used == pytest.approx(lrs) if lrs else used[-1] < 0.1


@pytest.mark.slow
def test_model_checkpoint_works_together_with_gptrains_checkpoints(tmp_path):
    words = (
        f"+callbacks.mine={{_target_: {LIGHTNING}.ModelCheckpoint, monitor: train/loss, mode: min,"
        " save_top_k: 2, save_last: true, every_n_train_steps: 1, filename: '{step}'}",
        f"+callbacks.top={{_target_: {LIGHTNING}.ModelCheckpoint, monitor: val/loss, mode: max,"
        " save_weights_only: true, dirpath: '${run_dir}/top', auto_insert_metric_name: false}",
        "trainer.val_check_interval=2", "scheduler.total_steps=6",
        "checkpoint.every_n_steps=1", "checkpoint.keep=9",
    )  # fmt: skip
    folder = tmp_path / "run"
    run = fit(*words, folder=folder)
    full, files = run.state(), sorted(p.name for p in folder.rglob("*.ckpt"))
    shutil.rmtree(folder)
    # A validation that is repeated would make ModelCheckpoint write a second version of its file.
    fails = f"{{_target_: {CALLBACKS}.Stop, how: error, at: on_before_backward, step: 5}}"
    fit(*words, f"+callbacks.fails={fails}", folder=folder, code=70)
    resumed = fit(*words, "ckpt_path=last", "allow_changes=[callbacks]", folder=folder).state()
    for state in (full, resumed):
        for callback in state["counters"]["callbacks"].values():
            callback.pop("current_score", None)  # Lightning does not restore it
    assert not (differences := same(full, resumed)), differences[:8]
    assert files == sorted(p.name for p in folder.rglob("*.ckpt"))
    (top,) = (folder / "top").glob("*.ckpt")
    kept = [*folder.rglob("step=*.ckpt")]
    assert len(kept) == 2 and len([*folder.rglob("last.ckpt")]) == 1
    assert "optimizer_states" not in torch.load(top, weights_only=True)
    for file in (top, kept[0]):
        step = int(torch.load(file, weights_only=True)["global_step"])
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        assert not same(*(gptrain.load(path).state_dict() for path in (file, checkpoint)))
    fit(f"init_from='{top}'", "trainer.max_steps=1")


def test_a_run_that_saves_no_checkpoint_stops_on_a_signal():
    stop = f"{{_target_: {CALLBACKS}.Stop, how: SIGTERM, at: on_validation_batch_end}}"
    run = fit("task=validate", "checkpoint=none", f"+callbacks.stop={stop}", code=75)
    assert not (run.folder / "result.json").exists() and run.status["step"] == 0

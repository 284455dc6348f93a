"""Usual Lightning features work as in any Lightning project, or are refused in one line."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.lit.conftest import OWN, differences, tensors

MODULES, CALLBACKS = f"module._target_={OWN}.modules", f"{OWN}.callbacks"
LIGHTNING = "lightning.pytorch.callbacks"
SEES = f"+callbacks.sees._target_={CALLBACKS}.SeesAll"
SEEN = (  # three tests read this run
    f"{MODULES}.Logs", f"+callbacks.mine._target_={CALLBACKS}.Logs", SEES,
    "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=3",
    "trainer.gradient_clip_val=0.5",
)  # fmt: skip


# self.log


def test_logged_values_form_one_row_per_optimizer_step(fit):
    run = fit(*SEEN, name=None)
    rows = run.rows
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert "epoch" not in rows[0]
    for name in ("train/loss", "train/mine", "train/both_step", "mine/batch_end", "mine/loss_step"):
        assert all(row[name] for row in rows), (name, rows)
    assert [bool(row["val/mine"]) for row in rows] == [False, False, True] * 2
    assert [bool(row["val/loss"]) for row in rows] == [False, False, True] * 2
    assert [bool(row["mine/val"]) for row in rows] == [False, False, True] * 2
    assert rows[-1]["train/both_epoch"]  # the run ends within its epoch
    # The loss of a micro-batch, which a module sees, is its part of the loss of the step.
    mean = sum(run.column("train/loss")) / 6
    assert float(rows[-1]["train/epoch_mean"]) == pytest.approx(mean, rel=1e-5)
    assert float(rows[-1]["mine/batch_end"]) == 11


def test_gptrains_metrics_are_in_callback_metrics_when_user_callbacks_run(fit):
    run = fit(*SEEN, name=None)
    for seen in run.seen:
        if seen["hook"] == "batch_end" and seen["step"] >= 1:
            assert {"train/loss", "lr", "grad_norm"} <= seen["metrics"].keys(), seen
        if seen["hook"].startswith("validation_e"):
            assert {"val/loss", "train/loss", "lr"} <= seen["metrics"].keys(), seen
    ends = [s for s in run.seen if s["hook"] == "batch_end"][1::2]
    assert [s["metrics"]["train/loss"] for s in ends] == pytest.approx(run.column("train/loss"))
    assert [s["step"] for s in ends] == [1, 2, 3, 4, 5, 6]
    assert all("loss" in s["outputs"] for s in ends)


def test_callbacks_see_the_gradients_before_the_optimizer_step(fit):
    run = fit(*SEEN, name=None)
    seen = [s for s in run.seen if s["hook"] == "before_step"]
    assert len(seen) == 6 and all(s["n_grads"] > 5 for s in seen)
    assert [s["norm"] for s in seen] == pytest.approx(run.column("grad_norm"), rel=1e-4)


# training_step


def test_training_step_may_return_none(fit):
    run = fit(f"{MODULES}.Returns", "+module.kind=once none", "trainer.accumulate_grad_batches=2")
    assert run.steps()[-1] == 6 and len(run.rows) == 6
    assert fit(f"{MODULES}.Returns", "+module.kind=none", name="never").steps()[-1] == 6


def test_batches_may_be_dicts(fit):
    data = [f"data.{part}._target_={OWN}.data.Dicts" for part in ("train", "val")]
    run, plain = fit(f"{MODULES}.OfDicts", *data), fit(name=None)
    assert not differences(run.state(6)["state_dict"], plain.state(6)["state_dict"])
    assert run.metrics["val/loss"] == plain.metrics["val/loss"]


# Optimizers and schedulers


@pytest.mark.filterwarnings(
    "error:To copy construct from a tensor"
)  # a learning rate may be a tensor
@pytest.mark.parametrize("kind", ["none", "epoch", "plateau_steps"])
def test_the_logged_lr_is_that_of_a_modules_own_optimizer_and_schedule(fit, kind):
    # Lightning counts micro-batches where a plateau in steps has a frequency of 4.
    n_micro_steps = 2 if kind == "plateau_steps" else 1
    run = fit(
        f"{MODULES}.OwnOptimizers", f"+module.kind={kind}", SEES, "trainer.val_check_interval=3",
        f"data.num_samples={12 * n_micro_steps}",
        f"trainer.accumulate_grad_batches={n_micro_steps}", "trainer.max_epochs=9",
    )  # fmt: skip
    used = [s["lr"] for s in run.seen if s["hook"] == "before_step"]
    assert run.column("lr") == pytest.approx(used)
    expected = {
        "none": [0.1] * 6, "epoch": [0.1] * 3 + [0.05] * 3,
    }  # fmt: skip
    if kind in expected:
        assert used == pytest.approx(expected[kind])
    else:
        assert used[-1] < 0.1


# Files


def test_model_checkpoint_works_together_with_gptrains_checkpoints(fit):
    words = (
        f"+callbacks.mine={{_target_: {LIGHTNING}.ModelCheckpoint, monitor: mine, mode: min,"
        " save_top_k: 2, save_last: true, every_n_train_steps: 1, filename: '{step}'}",
        f"+callbacks.top={{_target_: {LIGHTNING}.ModelCheckpoint, monitor: val/loss, mode: max,"
        " save_weights_only: true, dirpath: '${run_dir}/top', auto_insert_metric_name: false}",
        f"{MODULES}.LogsMine", "trainer.val_check_interval=2", "scheduler.total_steps=6",
        "checkpoint.every_n_steps=1", "checkpoint.keep=9",
    )  # fmt: skip
    run = fit(*words)
    full, files = run.state(6), sorted(p.name for p in run.folder.rglob("*.ckpt"))
    shutil.rmtree(run.folder)
    # A validation that is repeated would make ModelCheckpoint write a second version of its file.
    fails = f"{{_target_: {CALLBACKS}.FailsInHook, hook: on_before_backward, step: 5}}"
    fit(*words, f"+callbacks.fails={fails}", code=70)
    run = fit(*words, "ckpt_path=last", "allow_changes=[callbacks]")
    resumed = run.state(6)
    for state in (full, resumed):
        for callback in state["callbacks"].values():
            callback.pop("current_score", None)  # Lightning does not restore it
    assert not (mismatches := differences(full, resumed)), mismatches[:8]
    assert files == sorted(p.name for p in run.folder.rglob("*.ckpt"))
    top = list((run.folder / "top").glob("*.ckpt"))
    assert len(top) == 1 and len(list(run.folder.rglob("last.ckpt"))) == 1
    kept = [p for p in run.folder.rglob("step=*.ckpt")]
    assert len(kept) == 2, kept
    content = torch.load(top[0], weights_only=True)
    assert "optimizer_states" not in content
    for n, file in enumerate((top[0], kept[0])):
        step = int(torch.load(file, weights_only=True)["global_step"])
        checkpoint = run.folder / "checkpoints" / f"step-{step:08d}"
        assert not differences(tensors(file), tensors(checkpoint))
        fit(f"init_from='{file}'", "trainer.max_steps=1", name=f"from-{n}")


# Lightning's callbacks


# Signals


@pytest.mark.parametrize(
    "task, hook",
    [("validate", "on_validation_batch_end")],
)  # fmt: skip
def test_a_run_that_saves_no_checkpoint_stops_on_a_signal(fit, task, hook):
    kill = f"+callbacks.kill={{_target_: {CALLBACKS}.Signals, step: 0, hook: {hook}}}"
    run = fit(f"task={task}", "checkpoint=none", kill, code=75)
    assert not (run.folder / "result.json").exists()
    assert run.status["step"] <= (hook == "on_train_batch_start")


# Loggers

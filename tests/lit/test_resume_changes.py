"""Options that change on resume are used and logged, also those of callbacks and metrics."""

from __future__ import annotations

import json
import re

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from gptrain.lit.callbacks.options import OptionTracker
from tests.lit.conftest import OWN, differences

SAVED = ("checkpoint.every_n_steps=1", "checkpoint.keep=9", "scheduler.total_steps=9")
CONSTANT = (*SAVED, "scheduler=constant")


def groups(run, step) -> list[dict]:
    return run.state(step)["optimizer_states"][0]["param_groups"]


def test_a_new_learning_rate_is_used_logged_and_saved(fit):
    words = (*SAVED, "scheduler=warmup_cosine")
    full = fit(*words, name=None)
    again = (*words, "ckpt_path=last", "optimizer.lr=3e-5")
    name = full.copy_until(3, "changed")
    line = fit(*again, name=name, code=2).errors[0]
    assert "optimizer.lr" in line and "allow_changes=[optimizer.lr]" in line
    run = fit(*again, "allow_changes=[optimizer.lr]", name=name)
    assert "optimizer.lr: 0.0003 before, 3e-05 now" in run.out
    assert run.column("lr")[:3] == pytest.approx(full.column("lr")[:3])
    assert run.column("lr")[3:] == pytest.approx([lr / 10 for lr in full.column("lr")[3:]])
    for now, before in zip(groups(run, 6), groups(full, 6), strict=True):
        assert now["lr"] == pytest.approx(before["lr"] / 10)
    losses = run.column("train/loss"), full.column("train/loss")
    assert losses[0][:4] == losses[1][:4] and losses[0][4:] != losses[1][4:]
    further = fit(*again, "trainer.max_steps=8", name=name)  # the new rate now belongs to the run
    assert further.column("lr")[6] < 4e-5


def test_a_new_weight_decay_is_used_and_saved(fit):
    full = fit(*CONSTANT, name=None)
    words = (*CONSTANT, "ckpt_path=last", "optimizer.weight_decay=0.5", "allow_changes=[optimizer]")
    run = fit(*words, name=full.copy_until(3, "decays"))
    assert "optimizer.weight_decay: 0.1 before, 0.5 now" in run.out
    assert [g["weight_decay"] for g in groups(full, 6)] == [0.1, 0.0]
    assert [g["weight_decay"] for g in groups(run, 6)] == [0.5, 0.0]
    assert run.column("train/loss")[4:] != full.column("train/loss")[4:]


def test_a_learning_rate_of_one_group_is_scaled_with_the_batch_and_may_change(fit):
    words = (*CONSTANT, "optimizer=muon", "optimizer.vector_lr=5e-4",
             "optimizer.lr_scaling=linear", "optimizer.reference_batch_size=1")  # fmt: skip
    first = fit(*words, "optimizer.embedding_lr=2e-3", "trainer.max_steps=3")
    before = [group["lr"] for group in groups(first, 3)]
    assert {0.008, 0.002} < {round(lr, 9) for lr in before}  # for batches of four samples
    again = ("optimizer.embedding_lr=1e-3", "ckpt_path=last")
    fit(*words, *again, code=2)
    run = fit(*words, *again, "allow_changes=[optimizer.embedding_lr]")
    after = [group["lr"] for group in groups(run, 6)]
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert changed == [pytest.approx((0.008, 0.004))]


def test_options_that_the_user_did_not_give_are_not_changed(fit):
    full = fit(*CONSTANT, name=None)
    words = (*CONSTANT, "ckpt_path=last", "allow_changes=[optimizer]")
    run = fit(*words, name=full.copy_until(3, "unchanged"))
    assert "before" not in run.out and groups(run, 6) == groups(full, 6)


@pytest.mark.slow
def test_a_stage_with_fewer_parameter_groups_than_the_net_resumes(fit):
    """A stage between the first and the last has two of Muon's three parameter groups."""
    words = (
        "optimizer=muon", "optimizer.lr=0.01", "data.batch_size=6", "model.n_layers=3",
        "trainer.max_steps=4", "trainer.val_check_interval=2", "checkpoint.keep=9",
    )  # fmt: skip
    three = ("trainer.devices=3", "strategy=pipeline", "strategy.microbatches=3")
    full = fit(*words, *three, name="full")
    again = fit(*words, *three, "ckpt_path=last", name=full.copy_until(2, "again"))
    assert not (mismatches := differences(full.state(4), again.state(4))), mismatches[:8]
    assert again.column("train/loss") == full.column("train/loss")
    alone = fit(*words, "ckpt_path=last", name=full.copy_until(2, "alone"))
    assert alone.column("train/loss") == pytest.approx(full.column("train/loss"), rel=1e-4)


def test_a_resume_with_another_batch_size_continues_at_the_next_sample_and_token_count(fit):
    words = (*CONSTANT, "data.num_samples=40")
    fit(*words, "trainer.max_steps=3")  # steps of 4 samples of 16 tokens
    again = ("ckpt_path=last", "data.batch_size=6", "trainer.max_steps=8")
    assert "data.global_batch_size" in fit(*words, *again, code=2).errors[0]
    allowed = (*again, "allow_changes=[data.global_batch_size]")
    by_tokens = (*allowed, "trainer.max_steps=-1", "max_tokens=4000")
    assert "max_tokens=4000: needs steps of one size" in fit(*words, *by_tokens, code=2).errors[0]
    run = fit(*words, *allowed)
    tokens = [64, 128, 192, 288, 384, 480, 576, 672]
    assert run.column("tokens") == tokens
    assert json.loads((run.folder / "result.json").read_text())["tokens"] == tokens[-1]
    assert run.state(8)["TextDataModule"]["tokens"] == tokens[-1]
    assert run.state(3)["TextDataModule"]["read"] == 3 * 4
    # The order continues at the next sample, also over the end of an epoch.
    assert [run.state(step)["TextDataModule"]["read"] for step in (4, 6, 8)] == [18, 30, 42]
    more = fit(
        *words, *again[:2], "trainer.max_steps=9"
    )  # the new batch size now belongs to the run
    assert more.column("tokens")[-1] == 768


# Options of callbacks, metrics and schedules that their state in the checkpoint also contains

STOP = "+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss"


def test_an_early_stopped_run_continues_with_another_patience(fit):
    words = ("scheduler=constant", "trainer.val_check_interval=1", "checkpoint.keep=9",
             "trainer.max_steps=8", "data.num_samples=64")  # fmt: skip
    stop = f"{STOP}, min_delta: 9.0"  # no improvement is ever large enough
    first = fit(*words, f"{stop}, patience: 2, verbose: true}}")
    assert first.steps()[-1] == 3
    assert "Metric val/loss improved. New best score" in first.out  # because of `verbose`
    run = fit(*words, f"{stop}, patience: 4}}", "ckpt_path=last")
    assert run.out.count("resumed with callbacks.stop.patience: 2 before, 4 now") == 1
    assert run.steps()[-1] == 5  # two validations without improvement, and two more
    assert "Metric val/loss" not in run.out
    run = fit(*words, f"{stop.replace('9.0', '0.0')}}}", "ckpt_path=last")  # patience: 3
    for line in ("patience: 4 before, 3 now", "min_delta: 9.0 before, 0.0 now"):
        assert f"resumed with callbacks.stop.{line}" in run.out


def test_new_options_of_a_user_callback_win_and_its_counters_continue(fit):
    """One counter is also an argument."""
    target = f"_target_: {OWN}.callbacks.Counts, start: 7"
    fit(*CONSTANT, f"+callbacks.mine={{{target}, every: 2}}", "trainer.max_steps=3")
    again = f"+callbacks.mine={{{target}, every: 5, scale: 0.5, limit: 4}}"
    run = fit(*CONSTANT, again, "trainer.max_steps=4", "ckpt_path=last")
    expected = {"every": 5, "scale": 0.5, "limit": 4, "count": 4, "start": 11}
    assert run.seen[-1] == expected
    for line in ("every: 2 before, 5 now", "scale: 1.0 before, 0.5 now", "limit: 3 before, 4 now"):
        assert f"resumed with callbacks.mine.{line}" in run.out
    same = fit(*CONSTANT, again, "trainer.max_steps=5", "ckpt_path=last")
    assert "resumed with" not in same.out
    assert same.seen[-1] == expected | {"count": 5, "start": 12}


def test_a_new_option_of_a_metric_overrides_the_value_in_its_state(fit):
    words = (*SAVED, "trainer.val_check_interval=1", "+module.metrics.near._target_="
             f"{OWN}.modules.Near")  # fmt: skip
    fit(*words, "+module.metrics.near.distance=0", "trainer.max_steps=2")
    changed = ("+module.metrics.near.distance=999", "allow_changes=[module.metrics]")
    run = fit(*words, *changed, "trainer.max_steps=3", "ckpt_path=last")
    assert "resumed with module.metrics.near.distance: 0 before, 999 now" in run.out
    assert run.column("val/near")[-1] == 8 * 16  # all targets of the validation set


def test_new_options_of_a_schedule_are_used_when_the_change_is_allowed(fit):
    words = ("checkpoint.every_n_steps=1", "checkpoint.keep=9",
             "scheduler._target_=torch.optim.lr_scheduler.StepLR")  # fmt: skip
    fit(*words, "+scheduler.step_size=1", "+scheduler.gamma=0.5", "trainer.max_steps=2")
    changed = ("+scheduler.step_size=2", "+scheduler.gamma=0.1", "optimizer.lr=3e-5")
    allowed = "allow_changes=[scheduler,optimizer.lr]"
    run = fit(*words, *changed, allowed, "ckpt_path=last", "trainer.max_steps=5")
    assert "resumed with scheduler.step_size: 1 before, 2 now" in run.out
    assert "resumed with scheduler.gamma: 0.5 before, 0.1 now" in run.out
    rates = run.column("lr")
    assert rates == pytest.approx([3e-4, 1.5e-4, 7.5e-6, 7.5e-6, 7.5e-7])


def test_model_checkpoint_keeps_the_new_number_of_files(fit):
    target = "_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: tokens, mode: max"
    words = (*CONSTANT, "trainer.val_check_interval=1")
    fit(*words, f"+callbacks.top={{{target}, save_top_k: 4}}", "trainer.max_steps=10")
    top = f"+callbacks.top={{{target}, save_top_k: 2}}"
    run = fit(*words, top, "ckpt_path=last", "trainer.max_steps=11")
    assert "resumed with callbacks.top.save_top_k: 4 before, 2 now" in run.out
    kept = sorted(path.name for path in (run.folder / "checkpoints").glob("*.ckpt"))
    # The second start resumes before the validation of step 10, with 8 and 9 in the ranking. They
    # are replaced by 10 and 11. The first start has left 7, which is out of the ranking.
    assert {re.search(r"step=(\d+)", name)[1] for name in kept} == {"7", "10", "11"}


class Nested(Callback):
    """Keeps an option and a counter under the same name in two dicts of its state."""

    def __init__(self, limit):
        self.parts = {"options": {"limit": limit}, "done": {"limit": 17}}

    def state_dict(self):
        return self.parts

    def load_state_dict(self, state):
        self.parts = state


def test_only_an_option_that_has_changed_is_set_again_and_an_absolute_path_is_no_option():
    """A path into the run folder is another one when the folder was moved."""

    def track(limit: int, folder: str) -> tuple[OptionTracker, Nested]:
        tracker = OptionTracker({})
        tracker.track("callbacks.nested", nested := Nested(limit), {"limit": limit})
        node = {"dirpath": folder, "filename": "a/b"}
        tracker.track("callbacks.top", ModelCheckpoint(**node), node)
        return tracker, nested

    before, _ = track(3, "/runs/a")
    now, nested = track(4, "/moved/a")
    nested.parts["options"]["limit"] = 3  # Lightning has loaded the state of the checkpoint
    changes = list(now.apply_changes(before.options, ("callbacks.",)))
    assert changes == ["resumed with callbacks.nested.limit: 3 before, 4 now"]
    assert nested.parts == {"options": {"limit": 4}, "done": {"limit": 17}}
    assert before.options["callbacks.top"]["filename"] == "a/b"

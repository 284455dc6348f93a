"""What allow_changes allows a resume to change of the optimizer has its effect, and is said."""

from __future__ import annotations

import json

import pytest

from tests.lit.conftest import differences

SAVED = ("checkpoint.every_n_steps=1", "checkpoint.keep=9", "scheduler.total_steps=9")
CONSTANT = (*SAVED, "scheduler=constant")


def groups(run, step) -> list[dict]:
    return run.state(step)["optimizer_states"][0]["param_groups"]


@pytest.mark.parametrize("scheduler", ["constant", "warmup_cosine"])
def test_a_new_learning_rate_is_used_logged_and_saved(fit, scheduler):
    words = (*SAVED, f"scheduler={scheduler}")
    full = fit(*words, name=None)
    again = (*words, "ckpt_path=last", "optimizer.lr=3e-5")
    name = full.copy_until(3, f"changed-{scheduler}")
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
    further = fit(*again, "trainer.max_steps=8", name=name)  # the new one is the run's own now
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
    assert {0.008, 0.002} < {round(lr, 9) for lr in before}  # of batches of four
    again = ("optimizer.embedding_lr=1e-3", "ckpt_path=last")
    fit(*words, *again, code=2)
    run = fit(*words, *again, "allow_changes=[optimizer.embedding_lr]")
    after = [group["lr"] for group in groups(run, 6)]
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert changed == [pytest.approx((0.008, 0.004))]


def test_nothing_is_changed_that_was_not_typed(fit):
    full = fit(*CONSTANT, name=None)
    words = (*CONSTANT, "ckpt_path=last", "allow_changes=[optimizer]")
    run = fit(*words, name=full.copy_until(3, "unchanged"))
    assert "before" not in run.out and groups(run, 6) == groups(full, 6)


def test_on_two_ranks_too(fit):
    words = (*CONSTANT, "trainer.devices=2", "strategy=fsdp")
    fit(*words, "trainer.max_steps=2")
    run = fit(
        *words, "ckpt_path=last", "optimizer.lr=3e-5", "allow_changes=[optimizer.lr]",
        "trainer.max_steps=4",
    )  # fmt: skip
    assert run.column("lr") == pytest.approx([3e-4, 3e-4, 3e-5, 3e-5])
    assert (run.folder / "train.log").read_text().count("0.0003 before, 3e-05 now") == 1


@pytest.mark.slow
def test_a_stage_that_has_fewer_groups_than_the_net_resumes(fit):
    """Of Muon's three groups the stages between the first and the last have two."""
    words = (
        "optimizer=muon", "optimizer.lr=0.01", "data.batch_size=6", "model.n_layers=3",
        "trainer.max_steps=4", "trainer.val_check_interval=2", "checkpoint.keep=9",
    )  # fmt: skip
    three = ("trainer.devices=3", "strategy=pipeline", "strategy.microbatches=3")
    full = fit(*words, *three, name="full")
    again = fit(*words, *three, "ckpt_path=last", name=full.copy_until(2, "again"))
    assert not (wrong := differences(full.state(4), again.state(4))), wrong[:8]
    assert again.column("train/loss") == full.column("train/loss")
    alone = fit(*words, "ckpt_path=last", name=full.copy_until(2, "alone"))
    assert alone.column("train/loss") == pytest.approx(full.column("train/loss"), rel=1e-4)


def test_another_batch_goes_on_at_the_next_sample_and_adds_to_the_tokens(fit):
    words = (*CONSTANT, "data.num_samples=40")
    fit(*words, "trainer.max_steps=3")  # steps of 4 samples of 16 tokens
    again = ("ckpt_path=last", "data.batch_size=6", "trainer.max_steps=8")
    assert "data.global_batch_size" in fit(*words, *again, code=2).errors[0]
    allowed = (*again, "allow_changes=[data.global_batch_size]")
    by_tokens = (*allowed, "trainer.max_steps=-1", "max_tokens=4000")
    assert "max_tokens=4000: counts steps" in fit(*words, *by_tokens, code=2).errors[0]
    run = fit(*words, *allowed)
    tokens = [64, 128, 192, 288, 384, 480, 576, 672]
    assert run.column("tokens") == tokens
    assert json.loads((run.folder / "result.json").read_text())["tokens"] == tokens[-1]
    assert run.state(8)["TextDataModule"]["tokens"] == tokens[-1]
    assert run.state(3)["TextDataModule"]["place"] == [0, 3 * 4]
    # 12 samples of 40 were seen: four steps of 6 fit into what is left, the last one is anew.
    places = [run.state(step)["TextDataModule"]["place"] for step in (4, 6, 8)]
    assert places == [[0, 18], [0, 30], [1, 6]]
    more = fit(*words, *again[:2], "trainer.max_steps=9")  # this batch is the run's own
    assert more.column("tokens")[-1] == 768

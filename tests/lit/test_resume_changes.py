"""Options that change on a resume are used and logged, or refused."""

from __future__ import annotations

from functools import partial

import pytest

from tests.lit import fit as runs

SAVED = ("checkpoint.every_n_steps=1", "checkpoint.keep=9", "scheduler.total_steps=9")
CONSTANT = (*SAVED, "scheduler=constant")


@pytest.fixture
def fit(tmp_path):
    """Return a function that runs train.py in one folder, unless another one is given."""
    return partial(runs.fit, folder=tmp_path / "run")


def groups(run, step) -> list[dict]:
    return run.state(step)["optimizer"]["groups"]


@pytest.mark.parametrize("word", ["scheduler=warmup_cosine", f"{runs.MODULES}.InTurn"])
def test_a_new_learning_rate_is_used_logged_and_saved(fit, tmp_path, word):
    words = (*SAVED, word)
    full = fit(*words)
    again = (*words, "ckpt_path=last", "optimizer.lr=3e-5")
    folder = full.copy_until(3, tmp_path / "changed")
    line = fit(*again, folder=folder, code=2).errors[0]
    assert "optimizer.lr" in line and "allow_changes=[optimizer.lr]" in line
    run = fit(*again, "allow_changes=[optimizer.lr]", folder=folder)
    assert "optimizer.lr: 0.0003 before, 3e-05 now" in run.out
    assert run.column("lr")[:3] == pytest.approx(full.column("lr")[:3])
    assert run.column("lr")[3:] == pytest.approx([lr / 10 for lr in full.column("lr")[3:]])
    for now, before in zip(groups(run, 6), groups(full, 6), strict=True):
        assert now["lr"] == pytest.approx(before["lr"] / 10)
    losses = run.column("train/loss"), full.column("train/loss")
    assert losses[0][:4] == losses[1][:4] and losses[0][4:] != losses[1][4:]
    further = fit(*again, "trainer.max_steps=8", folder=folder)  # the new rate is kept
    assert further.column("lr")[6] < 4e-5


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


def test_a_resume_with_another_batch_size_continues_at_the_next_sample_and_token_count(fit):
    words = (*CONSTANT, "data.num_samples=40", "optimizer.lr_scaling=linear")
    fit(*words, "trainer.max_steps=3")  # steps of 4 samples of 16 tokens
    again = ("ckpt_path=last", "data.batch_size=6", "trainer.max_steps=8")
    assert "data.global_batch_size" in fit(*words, *again, code=2).errors[0]
    allowed = (*again, "allow_changes=[data.global_batch_size]")
    by_epochs = (*words, *allowed, "trainer.max_steps=-1")
    assert "trainer.max_epochs: needs steps of one size" in fit(*by_epochs, code=2).errors[0]
    by_tokens = (*by_epochs, "max_tokens=4000")
    assert "max_tokens=4000.0: needs steps of one size" in fit(*by_tokens, code=2).errors[0]
    run = fit(*words, *allowed)
    assert run.column("lr")[3:] == pytest.approx([1.5 * run.column("lr")[0]] * 5)
    tokens = [64, 128, 192, 288, 384, 480, 576, 672]
    assert run.column("tokens") == tokens
    assert run.result["tokens"] == tokens[-1]
    assert run.state(8)["counters"]["TextDataModule"]["tokens"] == tokens[-1]
    assert run.state(3)["counters"]["TextDataModule"]["read"] == 3 * 4
    # The order continues at the next sample, also over the end of an epoch.
    read = [run.state(n)["counters"]["TextDataModule"]["read"] for n in (4, 6, 8)]
    assert read == [18, 30, 42]
    more = fit(*words, *again[:2], "trainer.max_steps=9")  # the new size belongs to the run
    assert more.column("tokens")[-1] == 768


def test_a_resume_under_another_strategy_says_that_means_over_the_epoch_differ(fit):
    words = (*CONSTANT, *runs.TWO, f"{runs.MODULES}.Logs", "data.global_batch_size=8")
    fit(*words, "strategy=ddp", "trainer.max_steps=2")
    again = fit(*words, "strategy=tensor_parallel", "ckpt_path=last")
    assert "means over this epoch differ" in again.out


# Callbacks, metrics and schedules

STOP = f"+callbacks.stop={{_target_: {runs.LIGHTNING}.EarlyStopping, monitor: val/loss"


def test_another_callback_is_refused_like_every_change(fit):
    """With permission its state in the checkpoint counts, as in Lightning: the patience, too."""
    words = ("scheduler=constant", "trainer.val_check_interval=1", "trainer.max_steps=8",
             "data.num_samples=64")  # fmt: skip
    stop = f"{STOP}, min_delta: 9.0"  # no improvement is ever large enough
    first = fit(*words, f"{stop}, patience: 2}}")
    assert first.steps[-1] == 3
    again = (*words, f"{stop}, patience: 4}}", "ckpt_path=last")
    (line,) = fit(*again, code=2).errors
    assert "error: callbacks.stop={" in line and "allow_changes=[callbacks.stop]" in line
    assert "error: callbacks.stop: " in fit(*words, "ckpt_path=last", code=2).errors[0]
    assert fit(*again, "allow_changes=[callbacks]").steps[-1] == 3


def test_a_schedule_of_torch_does_not_change_because_its_state_has_its_options(fit):
    words = ("scheduler._target_=torch.optim.lr_scheduler.StepLR", "+scheduler.step_size=1")
    fit(*words, "+scheduler.gamma=0.5", "trainer.max_steps=2")
    changed = ("+scheduler.gamma=0.1", "allow_changes=[scheduler]", "ckpt_path=last")
    (line,) = fit(*words, *changed, code=2).errors
    assert line.startswith("error: scheduler.gamma=0.1: ")


@pytest.mark.slow
def test_a_resume_says_what_powersgd_has_lost(fit):
    words = (*CONSTANT, *runs.TWO, "strategy=ddp", "strategy.comm_hook=powersgd")
    first = fit(*words, "trainer.max_steps=2")
    again = fit(*words, "ckpt_path=last")
    assert "powersgd has lost" in again.out and "powersgd has lost" not in first.out

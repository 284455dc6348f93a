"""A step on what is not a number is not taken, whether that is read at once or one step later."""

from __future__ import annotations

import pytest
import torch

from gptrain.lit import LanguageModel
from gptrain.lit.callbacks import finite

BAD_STEP = 2


@pytest.fixture
def read_later(monkeypatch):
    """As on a GPU: torch's fused AdamW can leave out a step on a CPU, too."""
    monkeypatch.setattr(finite, "is_read_later", lambda norm, opt: opt.defaults["fused"])


@pytest.fixture
def poison(monkeypatch):
    """Makes the loss of BAD_STEP not a number."""
    training_step = LanguageModel.training_step

    def poisoned(self, batch, batch_idx):
        loss = training_step(self, batch, batch_idx)
        if self.trainer.global_step == BAD_STEP:
            loss = loss * float("nan")
        return loss

    monkeypatch.setattr(LanguageModel, "training_step", poisoned)


@pytest.fixture
def caught(monkeypatch):
    """Weights and optimizer state, by the names of a checkpoint, when the end is told."""
    found, skip_or_stop = {}, finite.FiniteCheck.skip_or_stop

    def looked(self, trainer, step, losses):
        names = {p: name for name, p in trainer.lightning_module.net.named_parameters()}
        found["weights"] = {name: p.detach().clone() for p, name in names.items()}
        found["state"] = {
            (names[p], key): value.clone()
            for p, state in trainer.optimizers[0].state.items()
            for key, value in state.items()
        }
        return skip_or_stop(self, trainer, step, losses)

    monkeypatch.setattr(finite.FiniteCheck, "skip_or_stop", looked)
    return found


@pytest.mark.parametrize(
    "first",
    [
        ("trainer.log_every_n_steps=1",),
        ("trainer.log_every_n_steps=100", "checkpoint=every_n_steps", "checkpoint.every_n_steps=1"),
        ("trainer.log_every_n_steps=100", f"trainer.val_check_interval={BAD_STEP + 1}"),
        ("trainer.log_every_n_steps=100",),
        ("trainer.log_every_n_steps=100", f"trainer.max_steps={BAD_STEP + 1}"),
    ],
    ids=["its log line", "its save", "its validation", "the next step", "the end"],
)
def test_a_run_stops_before_the_step_whatever_would_come_after_it(
    train, read_later, poison, caught, first
):
    good = train(f"trainer.max_steps={BAD_STEP}", "scheduler=constant", name="good").state(BAD_STEP)
    run = train("trainer.max_steps=6", "scheduler=constant", *first)
    assert run.code == 79
    assert f"the loss of rank 0 at step {BAD_STEP} is not finite; samples: " in run.err
    for name, weight in caught["weights"].items():
        assert torch.equal(weight, good["state_dict"][name]), name
    for (name, key), value in caught["state"].items():
        assert torch.equal(value, good["optimizer_states"][0]["state"][name][key]), (name, key)
    saved = [int(path.name[5:]) for path in (run.folder / "checkpoints").glob("step-*")]
    assert max(saved, default=0) <= BAD_STEP


@pytest.mark.parametrize("batches", [0, 1])
def test_a_step_that_another_callback_ends_the_run_with_is_found_out(
    train, read_later, poison, caught, monkeypatch, batches
):
    """After the line of the log, where Timer and EarlyStopping do; no save, none validated."""

    def end(self, *args):
        self.trainer.should_stop |= self.trainer.global_step > BAD_STEP

    monkeypatch.setattr(LanguageModel, "on_train_batch_end", end)
    words = ("checkpoint=none", "trainer.log_every_n_steps=100", "trainer.max_steps=6")
    run = train(*words, f"trainer.limit_val_batches={batches}")
    assert run.code == 79, run.err
    assert f"the loss of rank 0 at step {BAD_STEP} is not finite; samples: " in run.err


def test_a_step_is_left_out_alike_both_ways(train, poison, request):
    """Read at once it has no gradients, read later the optimizer is told: the same weights."""
    options = ("trainer.max_steps=5", "on_nonfinite=skip", "logger=csv")
    at_once = train(*options, name="at_once")
    request.getfixturevalue("read_later")
    later = train(*options, name="later")
    for run in (at_once, later):
        assert run.code == 0, run.err
        assert (run.out + run.err).count(f"step {BAD_STEP} is not finite") == 1
    weights = at_once.state(5)["state_dict"]
    for name, weight in later.state(5)["state_dict"].items():
        assert weight.isfinite().all() and torch.equal(weight, weights[name]), name


@pytest.mark.gpu
def test_nothing_waits_for_a_gpu_on_a_step_that_does_not_log(train, monkeypatch):
    """From the second step on: the first makes the optimizer's state."""
    batch_start, batch_end = LanguageModel.on_train_batch_start, LanguageModel.on_train_batch_end

    def strict(self, *args):
        torch.cuda.set_sync_debug_mode("error" if 1 <= self.trainer.global_step < 8 else "default")
        return batch_start(self, *args)

    def lenient(self, *args):
        torch.cuda.set_sync_debug_mode("default")
        return batch_end(self, *args)

    monkeypatch.setattr(LanguageModel, "on_train_batch_start", strict)
    monkeypatch.setattr(LanguageModel, "on_train_batch_end", lenient)
    run = train("trainer.accelerator=gpu", "trainer.max_steps=9", "trainer.log_every_n_steps=100")
    torch.cuda.set_sync_debug_mode("default")
    assert run.code == 0, run.err

"""A step whose loss or gradients are not finite is not taken."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

from gptrain.lit import LanguageModel

BAD_STEP = 2


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


def test_a_run_stops_before_the_step_and_saves_nothing_of_it(train, poison):
    run = train("trainer.max_steps=6", "checkpoint=every_n_steps", "checkpoint.every_n_steps=1")
    assert run.code == 79
    assert f"the loss of rank 0 at step {BAD_STEP} is not finite; samples: " in run.err
    saved = [int(path.name[5:]) for path in (run.folder / "checkpoints").glob("step-*")]
    assert max(saved) == BAD_STEP


def test_a_skipped_step_leaves_weights_and_the_optimizer_as_they_were(train, poison, monkeypatch):
    seen, step = [], AdamW.step

    def looked(self, *args, **kwargs):
        tensors = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in tensors]
        result = step(self, *args, **kwargs)
        seen.append(all(torch.equal(p, q) for p, q in zip(tensors, before, strict=True)))
        return result

    monkeypatch.setattr(AdamW, "step", looked)
    run = train("trainer.max_steps=5", "on_nonfinite=skip", "logger=csv")
    assert run.code == 0, run.err
    assert (run.out + run.err).count(f"step {BAD_STEP} is not finite") == 1
    assert [number for number, same in enumerate(seen) if same] == [BAD_STEP]
    states = run.state(5)["optimizer_states"][0]["state"].values()
    assert all(value.isfinite().all() for state in states for value in state.values())
    assert {float(state["step"]) for state in states} == {4.0}


BREAKS = "+callbacks.breaks={_target_: tests.lit.own.callbacks.BreaksLayer, layer: %s, at: %s}"


TWO = "trainer.devices=2"


@pytest.mark.parametrize("ranks", [(), (TWO,), (TWO, "strategy=fsdp")], ids=["one", "ddp", "fsdp"])
def test_the_layer_that_is_first_not_finite_is_named(train, ranks):
    run = train(*ranks, "trainer.max_steps=4", BREAKS % ("blocks.1.mlp.down_proj", "output"))
    assert run.code == 79, run.err
    assert "not finite; samples: " in run.err
    assert "first not finite in blocks.1.mlp.down_proj" in run.err
    assert (run.folder / "checkpoints/step-00000002").is_dir()  # the steps before are kept


@pytest.mark.parametrize(
    "at, named",
    [("weight", "not finite in the parameter blocks.1.mlp.down_proj.weight"),
     ("gradient", "the gradient is first not finite in blocks.1.mlp.down_proj")],
)  # fmt: skip
def test_a_parameter_or_a_gradient_is_named_where_that_is_first(train, at, named):
    run = train("trainer.max_steps=4", BREAKS % ("blocks.1.mlp.down_proj", at))
    assert run.code == 79 and named in run.err, run.err


def test_a_run_that_skips_max_skips_steps_in_a_row_stops(train):
    words = ("trainer.max_steps=30", "on_nonfinite=skip", "max_skips=3")
    run = train(*words, BREAKS % ("blocks.1.mlp.down_proj", "output"))
    assert run.code == 79, run.err
    assert "3 steps in a row were skipped (max_skips)" in run.err
    assert "at step 4 " in run.err and "first not finite in blocks.1.mlp.down_proj" in run.err

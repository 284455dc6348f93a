"""A step whose loss or gradients are not finite is not taken."""

from __future__ import annotations

import re
from statistics import mean, pstdev

import numpy as np
import pytest
import torch
from torch.optim import AdamW

from gptrain.core.precision import Precision
from gptrain.data import SampleOrder
from gptrain.lit import LanguageModel
from gptrain.lit.guard import Spikes

BAD_STEP = 2


@pytest.fixture
def poison(monkeypatch):
    """Makes the loss of the last micro-step of BAD_STEP not a number."""
    training_step = LanguageModel.training_step

    def poisoned(self, batch, batch_idx):
        loss = training_step(self, batch, batch_idx)
        if batch_idx + 1 == (BAD_STEP + 1) * self.trainer.accumulate_grad_batches:
            loss = loss * float("nan")
        return loss

    monkeypatch.setattr(LanguageModel, "training_step", poisoned)


def test_a_run_stops_before_the_step_and_saves_nothing_of_it(train, poison):
    words = ("checkpoint=every_n_steps", "checkpoint.every_n_steps=1")
    run = train("trainer.max_steps=6", "trainer.accumulate_grad_batches=2", *words)
    assert run.code == 79
    samples = SampleOrder(10_000, seed=42).index(8 * BAD_STEP + np.arange(8)).tolist()
    shown = ", ".join(str(index) for index in samples)
    assert f"step {BAD_STEP} is not finite; samples: {shown};" in run.err
    assert "trainer.detect_anomaly=true" in run.err
    saved = [int(path.name[5:]) for path in (run.folder / "checkpoints").glob("step-*")]
    assert max(saved) == BAD_STEP


@pytest.fixture
def unchanged(monkeypatch) -> list[bool]:
    """Whether each optimizer step has left the weights as they were."""
    steps, step = [], AdamW.step

    def looked(self, *args, **kwargs):
        tensors = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in tensors]
        result = step(self, *args, **kwargs)
        steps.append(all(torch.equal(p, q) for p, q in zip(tensors, before, strict=True)))
        return result

    monkeypatch.setattr(AdamW, "step", looked)
    return steps


def test_after_the_step_that_ends_a_run_no_step_changes_a_weight(train, poison, unchanged):
    """The host reads the counters when the seventh step is logged."""
    run = train("trainer.max_steps=9", "trainer.log_every_n_steps=7", "checkpoint=none")
    assert run.code == 79 and f"step {BAD_STEP} is not finite" in run.err
    assert unchanged == [False] * BAD_STEP + [True] * (7 - BAD_STEP)


def test_a_skipped_step_leaves_weights_and_the_optimizer_as_they_were(train, poison, unchanged):
    words = ("on_nonfinite=skip", "model.dropout=0.1", "optimizer.fused=true")
    run = train("trainer.max_steps=5", "logger=none", *words)
    assert run.code == 0, run.err
    assert (run.out + run.err).count(f"step {BAD_STEP} is not finite;") == 1
    assert [number for number, same in enumerate(unchanged) if same] == [BAD_STEP]
    states = run.state(5)["optimizer"]["state"].values()
    assert all(value.isfinite().all() for state in states for value in state.values())
    assert {float(state["step"]) for state in states} == {4.0}


BREAKS = "+callbacks.breaks={_target_: tests.lit.own.callbacks.BreaksLayer, layer: %s}"


@pytest.fixture
def any_precision(monkeypatch):
    """Let a run on a CPU begin with a loss scaler, which Lightning has on GPUs only."""
    monkeypatch.setattr("gptrain.runtime.devices.find_precision", lambda name: Precision())


SCALED = (
    "trainer._target_=tests.lit.own.modules.trainer_with_loss_scaler",
    "trainer.precision=16-mixed",
)  # fmt: skip


# This module clips the gradients of a step for a second time, after the step was decided.
CLIPS = ("on_nonfinite=skip", "module._target_=tests.lit.own.modules.ClipsItself")


@pytest.mark.parametrize("skips", [CLIPS, SCALED])
def test_a_run_that_skips_max_skips_steps_in_a_row_stops(train, skips, any_precision):
    words = ("trainer.max_steps=30", *skips, "max_skips=3")
    run = train(*words, BREAKS % "blocks.1.mlp.down_proj")
    assert run.code == 79, run.err
    assert "3 steps in a row were skipped (max_skips)" in run.err
    assert "step 4 is not finite" in run.err
    # A loss scaler skips steps as long as it seeks its scale, which is no news.
    assert ("is not finite" in run.out) == (skips is CLIPS)


def test_a_loss_scale_that_no_gradient_bears_is_named_after_max_skips_steps(train, any_precision):
    run = train(*SCALED, "+trainer.init_scale=1e30", "max_skips=3", "trainer.limit_val_batches=0")
    assert run.code == 79 and "trainer.precision=bf16-mixed" in run.err, run.err
    assert "step 2 is " in run.err and "; 3 steps in a row were skipped" in run.err


SPIKE = "+callbacks.spike={_target_: tests.lit.own.callbacks.SpikesLoss, steps: [%s]}"
GUARD = ("spike.window=8", "trainer.log_every_n_steps=1", "logger=none")


def test_a_spike_is_a_step_far_above_the_mean_of_the_window():
    """The expected flags use the standard library's mean and standard deviation."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(60, 2, generator=generator, dtype=torch.float64) + 5.0
    # Step 8 is the first with half a window before it. The loss of step 7 widens only its own
    # column.
    values[7, 0] = values[8, 1] = values[27, 0] = values[40, 1] = 25.0
    values[30] = float("nan")  # the window ignores NaN, and another rule handles it
    rule, repeated = (Spikes(3.0, 16) for _ in range(2))
    flags, expected = [], []
    for step, (loss, norm) in enumerate(values):
        measured = loss, norm.float(), step
        if rule.history is not None:
            repeated.history = rule.history.clone()  # equals a resume at each step
        flags.append(bool(rule.flag(*measured)))
        assert bool(rule.flag(*measured)) == bool(repeated.flag(*measured)) == flags[-1]
        is_spike = False
        for column, value in ((0, float(loss)), (1, float(norm.float()))):
            before = values[max(0, step - 16) : step, column]
            window = [float(x) for x in before if x.isfinite()]
            if len(window) >= 8:
                is_spike |= value > mean(window) + 3.0 * pstdev(window)
        expected.append(is_spike)
    assert flags == expected and not flags[7] and not flags[30]
    assert flags[8] and flags[27] and flags[40]
    nothing, high = torch.tensor(float("nan")), torch.tensor(25.0)
    assert bool(rule.flag(nothing, high, 60))  # the loss is not finite, and the norm is a spike
    wider = Spikes(3.0, 40)  # a window of another size begins with no known step
    wider.history = rule.history
    assert not bool(wider.flag(high, high, 60))


def test_a_spike_is_only_reported_where_that_is_asked_for(train):
    """The optimizer counts the steps that it has taken."""
    run = train(*GUARD, "on_spike=warn", SPIKE % 9, "trainer.max_steps=10")
    assert run.code == 0, run.err
    assert re.findall(r"step (\d+) is a spike", run.out) == ["9"]
    taken = run.state(10)["optimizer"]["state"].values()
    assert {float(values["step"]) for values in taken} == {10.0}


def test_max_skips_spikes_in_a_row_end_the_run_also_after_a_resume(train):
    """Step 4 was skipped as well, but is not one of the steps in a row."""
    words = (*GUARD, "on_spike=skip", "checkpoint=every_n_steps", "checkpoint.every_n_steps=12")
    words = (*words, "max_skips=3", "spike.window=6", SPIKE % "4,11,12,13,14")
    first = train(*words, "spike.sigma=50", "trainer.max_steps=12")
    assert first.code == 0, first.err
    assert re.findall(r"step (\d+) is a spike", first.out) == ["4", "11"]
    again = train(*words, "spike.sigma=0.5", "trainer.max_steps=15", "ckpt_path=last")
    assert again.code == 79 and "step 13 is a spike" in again.err, again.err
    assert "3 steps in a row were skipped (max_skips)" in again.err
    assert again.status["cause"] == "spike"

"""A step whose loss or gradients are not finite is not taken."""

from __future__ import annotations

import json
import re
from collections import Counter
from statistics import mean, pstdev

import numpy as np
import pytest
import torch
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

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
    assert (run.out + run.err).count(f"the last one step {BAD_STEP};") == 1
    assert [number for number, same in enumerate(unchanged) if same] == [BAD_STEP]
    states = run.state(5)["optimizer_states"][0]["state"].values()
    assert all(value.isfinite().all() for state in states for value in state.values())
    assert {float(state["step"]) for state in states} == {4.0}


class CountsReads(TorchDispatchMode):
    """Counts by step how often the host reads a value of a tensor, as `float(tensor)` does."""

    def __init__(self):
        super().__init__()
        self.step, self.reads = 0, Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.reads[self.step] += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


def test_the_host_reads_no_tensor_in_a_step_that_is_not_logged(train, monkeypatch):
    counts, training_step = CountsReads(), LanguageModel.training_step

    def counted(self, batch, batch_idx):
        counts.step = self.trainer.global_step
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", counted)
    # The data loader counts the targets on the host.
    name = "gptrain.lit.datamodule.count_batch_targets"
    monkeypatch.setattr(name, lambda batch: batch[1].numel())
    with counts:
        words = ("optimizer=muon", "trainer.max_steps=8", "trainer.log_every_n_steps=7")
        # No step is a spike, whatever the losses are: the report of a spike reads tensors.
        run = train(*words, "on_spike=skip", "spike.window=4", "spike.sigma=1000")
    assert run.code == 0, run.err
    assert counts.reads[0] and counts.reads[6]  # the first and the seventh step are logged
    assert [counts.reads[step] for step in range(1, 6)] == [0] * 5


BREAKS = "+callbacks.breaks={_target_: tests.lit.own.callbacks.BreaksLayer, layer: %s}"


NODES = "+callbacks.nodes._target_=tests.lit.own.callbacks.OneRankPerNode"


SCALED = (
    "trainer._target_=tests.lit.own.modules.trainer_with_loss_scaler",
    "trainer.accelerator=auto", "trainer.precision=16-mixed",
)  # fmt: skip


# This module clips the gradients of a step for a second time, so that the step is decided twice.
CLIPS = ("on_nonfinite=skip", "module._target_=tests.lit.own.modules.ClipsItself")


@pytest.mark.parametrize("skips", [CLIPS, SCALED])
def test_a_run_that_skips_max_skips_steps_in_a_row_stops(train, skips):
    # The Trainer of SCALED has the loss scaler that Lightning has on GPUs only.
    words = ("trainer.max_steps=30", *skips, "max_skips=3")
    run = train(*words, BREAKS % "blocks.1.mlp.down_proj")
    assert run.code == 79, run.err
    assert "3 steps in a row were skipped (max_skips)" in run.err
    assert "step 4 is not finite" in run.err
    # A loss scaler skips steps as long as it seeks its scale, which is no news.
    assert "and skipped" not in run.out


def test_a_loss_scale_that_no_gradient_bears_is_named_after_max_skips_steps(train):
    run = train(*SCALED, "+trainer.init_scale=1e30", "max_skips=3", "trainer.limit_val_batches=0")
    assert run.code == 79 and "trainer.precision=bf16-mixed" in run.err, run.err
    assert "step 2 is " in run.err and "; 3 steps in a row were skipped" in run.err


SPIKE = "+callbacks.spike={_target_: tests.lit.own.callbacks.SpikesLoss, steps: [%s]}"
GUARD = ("on_spike=skip", "spike.window=8", "trainer.log_every_n_steps=1", "logger=none")


def logged(run) -> list[dict]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


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


def n_skipped(state: dict) -> int:
    """Return how many steps in a row were skipped before a checkpoint."""
    (skipped,) = (s["n_skipped"] for s in state["callbacks"].values() if "n_skipped" in s)
    return skipped


def test_a_spike_is_skipped_or_only_reported(train):
    """The optimizer counts the steps that it has taken."""
    for on_spike, n_taken in (("skip", 9), ("warn", 10)):
        words = (*GUARD, f"on_spike={on_spike}", SPIKE % 9, "trainer.max_steps=10")
        run = train(*words, name=on_spike)
        assert run.code == 0, run.err
        (line,) = [line for line in run.out.splitlines() if "1 step a spike" in line]
        assert "the last one step 9" in line and ("and skipped" in line) == (n_taken == 9)
        state = run.state(10)
        taken = state["optimizer_states"][0]["state"].values()
        assert {float(values["step"]) for values in taken} == {float(n_taken)}
        assert n_skipped(state) == 10 - n_taken  # a step that is only reported counts as taken


def test_a_resumed_run_knows_the_steps_before_and_max_skips_ends_it(train):
    """A new window would have no standard deviation yet. The step before the stop was skipped.

    Step 4 was skipped as well, but is not one of the steps in a row.
    """
    words = (*GUARD, "checkpoint=every_n_steps", "checkpoint.every_n_steps=12", "max_skips=3")
    words = (*words, "spike.window=6", SPIKE % "4,11,12,13,14")
    first = train(*words, "spike.sigma=50", "trainer.max_steps=12")
    assert first.code == 0, first.err
    assert re.findall(r"the last one step (\d+)", first.out) == ["4", "11"]
    again = train(*words, "spike.sigma=0.5", "trainer.max_steps=15", "ckpt_path=last")
    assert again.code == 79, again.err
    assert "step 13 is a spike" in again.err
    assert "3 steps in a row were skipped (max_skips)" in again.err
    assert json.loads((again.folder / "status.json").read_text())["cause"] == "spike"
    assert n_skipped(again.state(12)) == 1  # nothing was saved after the step that ended the run

"""A step whose loss or gradients are not finite is not taken."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from statistics import mean, pstdev
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hydra.utils import get_method
from torch.nn.utils import get_total_norm
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptrain.core.strategies import ParallelDims
from gptrain.data import SampleOrder
from gptrain.lit import LanguageModel, nonfinite
from gptrain.lit.decisions import skips_on_device
from gptrain.lit.nonfinite import NonFiniteRule
from gptrain.lit.spikes import SpikeRule
from gptrain.lit.strategies import LightningStrategy
from gptrain.lit.strategies.replicated import LightningSingleDevice
from gptrain.parallel.strategy import ParallelStrategy

BAD_STEP = 2


@pytest.fixture
def poison(monkeypatch):
    """Makes the loss of the last micro-step of BAD_STEP not a number."""
    training_step = LanguageModel.training_step

    def poisoned(self, batch, batch_idx):
        loss = training_step(self, batch, batch_idx)
        self.log("n_micro_steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
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
    assert f"the loss of rank 0 at step {BAD_STEP} is not finite; samples: {shown};" in run.err
    assert "first not finite in the loss; all layers are finite" in run.err
    saved = [int(path.name[5:]) for path in (run.folder / "checkpoints").glob("step-*")]
    assert max(saved) == BAD_STEP


def test_a_skipped_step_leaves_weights_and_the_optimizer_as_they_were(train, poison, monkeypatch):
    seen, drawn_from, step = [], [], AdamW.step

    def looked(self, *args, **kwargs):
        tensors = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in tensors]
        result = step(self, *args, **kwargs)
        seen.append(all(torch.equal(p, q) for p, q in zip(tensors, before, strict=True)))
        drawn_from.append(torch.get_rng_state().numpy().tobytes())
        return result

    norms, updating, clip = [], [], LightningStrategy.clip

    def clipped(self, optimizer, max_norm):
        updating.append(self.is_updating)
        clip(self, optimizer, max_norm)
        updating.append(self.is_updating)  # an error from here to the end of the step saves nothing
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append((float(get_total_norm(gradients)), self.grad_norm.clamp(max=max_norm)))

    monkeypatch.setattr(AdamW, "step", looked)
    monkeypatch.setattr(LightningStrategy, "clip", clipped)
    run = train("trainer.max_steps=5", "on_nonfinite=skip", "logger=none", "model.dropout=0.1")
    assert run.code == 0, run.err
    assert (run.out + run.err).count(f"step {BAD_STEP} is not finite") == 1
    assert [number for number, same in enumerate(seen) if same] == [BAD_STEP]
    # The report repeats the step, while the gradients of the next step are ready. Its dropout is
    # drawn once, its values are logged once, and the gradients of the next step stay.
    assert "first not finite in the loss" in run.out + run.err
    assert len(set(drawn_from)) == 5 and run.metrics["n_micro_steps"] == 5
    assert updating == [False, True] * 5
    del norms[BAD_STEP]
    assert all(seen == pytest.approx(float(norm), rel=1e-4) for seen, norm in norms)
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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_host_reads_no_tensor_in_a_step_that_is_not_logged(train, monkeypatch, optimizer):
    counts, training_step = CountsReads(), LanguageModel.training_step

    def counted(self, batch, batch_idx):
        counts.step = self.trainer.global_step
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", counted)
    # The data loader counts the targets on the host.
    name = "gptrain.lit.datamodule.count_batch_targets"
    monkeypatch.setattr(name, lambda batch: batch[1].numel())
    with counts:
        words = (f"optimizer={optimizer}", "trainer.max_steps=8", "trainer.log_every_n_steps=7")
        # No step is a spike, whatever the losses are: the report of a spike reads tensors.
        run = train(*words, "on_spike=skip", "spike.window=4", "spike.sigma=1000")
    assert run.code == 0, run.err
    assert counts.reads[0] and counts.reads[6]  # the first and the seventh step are logged
    assert [counts.reads[step] for step in range(1, 6)] == [0] * 5


BREAKS = "+callbacks.breaks={_target_: tests.lit.own.callbacks.BreaksLayer, layer: %s, at: %s}"
BREAKS_ON_RANK = BREAKS.replace("}", ", rank: %s}")


TWO = "trainer.devices=2"
NODES = "+callbacks.nodes._target_=tests.lit.own.callbacks.OneRankPerNode"


@pytest.mark.parametrize(
    "ranks", [(), (TWO, NODES), (TWO, NODES, "strategy=fsdp")], ids=["one", "ddp", "fsdp"]
)
def test_the_layer_that_is_first_not_finite_is_named(train, ranks):
    """With two ranks only the second one has such a layer, and the samples are its own."""
    last = 1 if ranks else 0
    breaks = BREAKS_ON_RANK % ("blocks.1.mlp.down_proj", "output", last)
    # A callback of the user with a state sees no step after the refused one.
    state = () if ranks else ("+callbacks.state._target_=tests.lit.own.callbacks.LastStart",)
    run = train(*ranks, "trainer.max_steps=4", breaks, *state)
    assert run.code == 79, run.err
    # The step has more samples under ddp and fsdp: those of a rank are four of eight.
    assert re.search(
        rf"the loss of rank {last} at step 2 is not finite; samples: (\d+, ){{3}}\d+;", run.err
    )
    where = " (rank 1)" if ranks else "\n"
    assert f"first not finite in blocks.1.mlp.down_proj{where}" in run.err
    saved = run.state(2)["callbacks"]  # the steps before are kept
    assert ranks or saved["LastStart"] == {"n_done": 2}


def test_a_layer_of_a_later_stage_comes_before_the_loss_of_the_first_rank(train):
    """Both ranks of a pipeline see that the loss is not finite."""
    words = (TWO, "strategy=pipeline", "trainer.max_steps=4")
    run = train(*words, BREAKS_ON_RANK % ("blocks.1.mlp.down_proj", "output", 1))
    assert run.code == 79, run.err
    assert "first not finite in blocks.1.mlp.down_proj (rank 1)" in run.err


@pytest.mark.parametrize(
    "at, named, words",
    [("weight", "not finite in the parameter blocks.1.mlp.down_proj.weight",
      ["module._target_=tests.lit.own.modules.WrapsBlocks"]),
     ("gradient", "the gradient is first not finite in blocks.1.mlp.down_proj",
      ["module._target_=tests.lit.own.modules.Returns", "+module.kind=dict"]),
     # The step is repeated in its own precision.
     ("'bf16 output'", "first not finite in blocks.1.mlp.down_proj\n",
      ["trainer.precision=bf16-mixed"])],
)  # fmt: skip
def test_a_parameter_or_a_gradient_is_named_where_that_is_first(train, at, named, words):
    run = train("trainer.max_steps=4", BREAKS % ("blocks.1.mlp.down_proj", at), *words)
    assert run.code == 79 and named in run.err, run.err


@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "gptrain.optim.Muon"])
def test_an_optimizer_that_is_told_to_skip_changes_no_weight_and_no_state(optimizer):
    net = torch.nn.Linear(4, 6)

    def build(fused: bool) -> torch.optim.Optimizer:
        names = [{"params": [net.weight], "use_muon": True}, {"params": [net.bias]}]
        return get_method(optimizer)(
            names if "Muon" in optimizer else net.parameters(), fused=fused
        )

    update, asks_nothing = build(fused=True), build(fused=False)
    assert skips_on_device(update) and not skips_on_device(asks_nothing)

    def values() -> list[torch.Tensor]:
        states = [update.state[p] for p in net.parameters()]
        return [value.clone() for value in tree_leaves([[*net.parameters()], states])]

    def step(value: float, found_inf: float | None) -> None:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, value)
        update.found_inf = None if found_inf is None else torch.tensor(found_inf)
        update.step()

    step(1.0, found_inf=0.0)
    before = values()
    step(float("nan"), found_inf=1.0)
    assert all(torch.equal(a, b) for a, b in zip(values(), before, strict=True))
    step(2.0, found_inf=None)
    changed = zip(net.parameters(), before[:2], strict=True)
    assert not any(torch.equal(parameter, old) for parameter, old in changed)
    assert all(value.isfinite().all() for value in values())


SCALED = (
    "trainer._target_=tests.lit.own.modules.trainer_with_loss_scaler",
    "trainer.accelerator=auto", "trainer.precision=16-mixed",
)  # fmt: skip


# This module clips the gradients of a step for a second time, so that the step is decided twice.
CLIPS = ("on_nonfinite=skip", "module._target_=tests.lit.own.modules.ClipsItself")


@pytest.mark.parametrize("skips", [CLIPS, SCALED])
def test_a_run_that_skips_max_skips_steps_in_a_row_stops(train, skips, monkeypatch):
    # The Trainer of SCALED has the loss scaler that Lightning has on GPUs only.
    monkeypatch.setattr("gptrain.config.preflight.devices.check_cpu", lambda checked: iter(()))
    words = ("trainer.max_steps=30", *skips, "max_skips=3")
    run = train(*words, BREAKS % ("blocks.1.mlp.down_proj", "output"))
    assert run.code == 79, run.err
    assert "3 steps in a row were skipped (max_skips)" in run.err
    assert "at step 4 " in run.err and "first not finite in blocks.1.mlp.down_proj" in run.err
    # A loss scaler skips steps as long as it seeks its scale, which is no news.
    assert run.out.count("; the step is skipped") == (2 if skips is CLIPS else 0)


def test_a_loss_scale_that_no_gradient_bears_is_named_after_max_skips_steps(train, monkeypatch):
    monkeypatch.setattr("gptrain.config.preflight.devices.check_cpu", lambda checked: iter(()))
    run = train(*SCALED, "+trainer.init_scale=1e30", "max_skips=3", "trainer.limit_val_batches=0")
    assert (
        run.code == 79 and "the scaled gradients overflow fp16; try trainer.precision=" in run.err
    ), run.err
    assert "at step 2 " in run.err and "; 3 steps in a row were skipped" in run.err


def test_scaled_gradients_are_unscaled_before_they_are_clipped(monkeypatch):
    """Lightning leaves the loss scale in the gradients of an optimizer that removes it itself."""
    calls: list[Any] = []
    strategy = LightningSingleDevice(ParallelStrategy())
    monkeypatch.setattr(strategy, "clip", lambda _, max_norm: calls.append(max_norm))
    module = LanguageModel(net := torch.nn.Linear(2, 2), AdamW)
    scaler = SimpleNamespace(unscale_=lambda _: calls.append("unscaled"))
    precision = SimpleNamespace(scaler=scaler)
    module.trainer = cast(Any, SimpleNamespace(strategy=strategy, precision_plugin=precision))
    for fused, expected in ((True, ["unscaled", 0.5]), (False, [0.5])):
        module.clip_gradients(AdamW(net.parameters(), fused=fused), 0.5, "norm")
        assert calls == expected
        calls.clear()
    precision.scaler = None
    module.clip_gradients(AdamW(net.parameters(), fused=True), 0.5)
    assert calls == [0.5]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        # The first rank with such a loss, and its own micro-step and samples.
        ([[1.0, 1.0], [1.0, math.nan], [math.inf, 1.0]], ("the loss of rank 4", 1, 4)),
        # Only gradients are not finite: the samples of all ranks.
        ([[1.0, 1.0]] * 3, ("the gradients of all ranks", 0, None)),
    ],
)
def test_a_refused_step_names_the_rank_and_the_samples_that_have_caused_it(
    losses, expected, monkeypatch
):
    gathered = [*zip((1, 4, 7), losses, strict=True)]
    monkeypatch.setattr(nonfinite, "gather", lambda *_: gathered)
    repeated = []
    monkeypatch.setattr(nonfinite, "find_first", lambda *arguments: repeated.append(arguments[-1]))
    asked = []
    data = SimpleNamespace(step_samples=lambda step, rank: asked.append((step, rank)) or [31, 32])
    trainer: Any = SimpleNamespace(strategy=None, datamodule=data, global_rank=1)
    step: Any = SimpleNamespace(step=9, micro_losses=[])
    error = NonFiniteRule("stop").describe(trainer, step)
    named, micro_step, rank = expected
    assert (repeated, asked) == ([micro_step], [(9, rank)])
    verb = "are" if rank is None else "is"
    assert str(error).startswith(f"{named} at step 9 {verb} not finite; samples: 31, 32;")
    assert nonfinite.NOT_REPRODUCED in str(error)


SPIKE = "+callbacks.spike={_target_: tests.lit.own.callbacks.SpikesLoss, steps: [%s]}"
GUARD = ("on_spike=skip", "spike.window=8", "trainer.log_every_n_steps=1", "logger=none")


def logged(run) -> list[dict]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def measured(step: int, loss: torch.Tensor, norm: torch.Tensor) -> Any:
    """Return what a SpikeRule reads of the strategy of a run in a step."""
    return SimpleNamespace(
        grad_norm=norm.float(),
        step_mean=SimpleNamespace(loss=loss),
        parallel=SimpleNamespace(dims=ParallelDims()),
        module=SimpleNamespace(trainer=SimpleNamespace(global_step=step)),
    )


def test_a_spike_is_a_step_far_above_the_mean_of_the_window():
    """The expected flags use the standard library's mean and standard deviation."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(60, 2, generator=generator, dtype=torch.float64) + 5.0
    # Step 8 is the first with half a window before it. The loss of step 7 widens only its own
    # column.
    values[7, 0] = values[8, 1] = values[27, 0] = values[40, 1] = 25.0
    values[30] = float("nan")  # the window ignores NaN, and another rule handles it
    rule, repeated = (SpikeRule("skip", 3.0, 16) for _ in range(2))
    flags, expected = [], []
    for step, (loss, norm) in enumerate(values):
        strategy = measured(step, loss, norm)
        if rule.history is not None:
            repeated.history = rule.history.clone()  # equals a resume at each step
        flags.append(bool(rule.flag(strategy)))
        assert bool(rule.flag(strategy)) == bool(repeated.flag(strategy)) == flags[-1]
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
    assert bool(rule.flag(measured(60, nothing, high)))  # another rule reports the loss
    (message,) = rule.describe(SimpleNamespace(), SimpleNamespace(step=60)).args
    assert message.startswith("the gradient norm at step 60 is 25, ")
    # The higher spike is named, whichever value is larger: 5 is 79 standard deviations above the
    # mean loss, and 61 is 1.2 above the mean norm.
    of_loss = SpikeRule("warn", 3.0, 4)
    for step, (loss, norm) in enumerate([*2 * [(1.0, 50.0), (1.1, 60.0)], (5.0, 61.0)]):
        is_flagged = of_loss.flag(measured(step, torch.tensor(loss), torch.tensor(norm)))
    assert bool(is_flagged)
    (message,) = of_loss.describe(SimpleNamespace(), SimpleNamespace(step=4)).args
    assert message.startswith(
        "the loss at step 4 is 5, 79.0 standard deviations above the mean 1.05"
    )
    wider = SpikeRule("skip", 3.0, 40)  # a window of another size begins with no known step
    wider.history = rule.history
    assert not bool(wider.flag(measured(60, high, high)))


def test_a_rounding_error_of_equal_losses_is_no_spike():
    rule, loss = SpikeRule("skip", 3.0, 16), torch.tensor(5.0)
    assert not any(bool(rule.flag(measured(step, loss, loss))) for step in range(16))
    assert not bool(rule.flag(measured(16, loss * (1 + 2e-6), loss)))
    assert bool(rule.flag(measured(16, loss * (1 + 4e-6), loss)))


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
        (line,) = [line for line in run.out.splitlines() if "standard deviations above" in line]
        assert "at step 9 is " in line and line.endswith("; the step is skipped") == (n_taken == 9)
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
    assert re.findall(r"at step (\d+) is ", first.out) == ["4", "11"]
    again = train(*words, "spike.sigma=0.5", "trainer.max_steps=15", "ckpt_path=last")
    assert again.code == 79, again.err
    assert "at step 13 is " in again.err
    assert "3 steps in a row were skipped (max_skips)" in again.err
    assert json.loads((again.folder / "status.json").read_text())["cause"] == "spike"
    assert n_skipped(again.state(13)) == 2  # the run that resumes repeats the third


@pytest.mark.slow
def test_all_ranks_skip_a_spike_of_one_rank_under_every_strategy(train):
    losses = {}
    for name in ("ddp", "fsdp", "pipeline"):
        size = ["data.batch_size=8"] if name == "pipeline" else []
        words = (*GUARD, TWO, f"strategy={name}", "trainer.max_steps=10", SPIKE % 7, *size)
        run = train(*words, name=name)
        assert run.code == 0, run.err
        (line,) = [line for line in run.out.splitlines() if "; the step is skipped" in line]
        # The loss of the spike itself depends on how many ranks have it.
        losses[name] = [row["train/loss"] for row in logged(run) if row["step"] != 8]
        assert losses[name] == pytest.approx(losses["ddp"], abs=1e-5)
        reported = re.search(r"the loss at step 7 is .* above the mean (\S+) of the last 8", line)
        assert reported and float(reported[1]) == pytest.approx(mean(losses[name][:7]), rel=1e-3)

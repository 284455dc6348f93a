"""A step whose loss or gradients are not finite is not taken."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hydra.utils import get_method
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
        run = train(f"optimizer={optimizer}", "trainer.max_steps=8", "trainer.log_every_n_steps=7")
    assert run.code == 0, run.err
    assert counts.reads[0] and counts.reads[6]  # the first and the seventh step are logged
    assert [counts.reads[step] for step in range(1, 6)] == [0] * 5


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=muon",),
        pytest.param(("trainer.devices=2", "strategy=fsdp"), marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_read_one_step_later_is_saved_and_repeated_bit_for_bit(train, words):
    """The hardware fails once: the run that resumes is equal to one that it never failed in."""
    words = (*words, "trainer.max_steps=5", "model.dropout=0.1", "scheduler.warmup_steps=4")
    broken = train(*words, BREAKS % ("blocks.1.mlp.down_proj", "output"))
    assert broken.code == 79 and f"at step {BAD_STEP} " in broken.err, broken.err
    resumed = train(*words, "ckpt_path=last")
    assert resumed.code == 0, resumed.err
    whole = train(*words, name="whole")
    for mine, theirs in zip(state_leaves(resumed), state_leaves(whole), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


def state_leaves(run) -> list[object]:
    """Return the tensors and values of a run's last checkpoint that an exact resume restores."""
    state = run.state(5)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "rng")
    return tree_leaves([state[name] for name in names])


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


@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "gptrain.optim.Muon"])
def test_an_optimizer_that_is_told_to_skip_changes_no_weight_and_no_state(optimizer):
    net = torch.nn.Linear(4, 6)
    names = [{"params": [net.weight], "use_muon": True}, {"params": [net.bias]}]
    update = get_method(optimizer)(names if "Muon" in optimizer else net.parameters(), fused=True)

    def values() -> list[torch.Tensor]:
        states = [update.state[p] for p in net.parameters()]
        return [value.clone() for value in tree_leaves([[*net.parameters()], states])]

    def step(value: float, found_inf: float) -> None:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, value)
        update.found_inf = torch.tensor(found_inf)
        update.step()

    step(1.0, found_inf=0.0)
    before = values()
    step(float("nan"), found_inf=1.0)
    assert all(torch.equal(a, b) for a, b in zip(values(), before, strict=True))
    step(2.0, found_inf=0.0)
    assert not torch.equal(values()[0], before[0])
    assert all(value.isfinite().all() for value in values())


def test_a_run_that_skips_max_skips_steps_in_a_row_stops(train):
    words = ("trainer.max_steps=30", "on_nonfinite=skip", "max_skips=3")
    run = train(*words, BREAKS % ("blocks.1.mlp.down_proj", "output"))
    assert run.code == 79, run.err
    assert "3 steps in a row were skipped (max_skips)" in run.err
    assert "at step 4 " in run.err and "first not finite in blocks.1.mlp.down_proj" in run.err

"""An optimizer and a strategy from outside the library, which state what the planner must know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from gptrain.assemble.optimizer import build_optimizer
from gptrain.config.check import check_config
from gptrain.config.cli import compose_command
from gptrain.config.compose import resolved
from gptrain.config.preflight.classes import check_classes
from gptrain.core.lengths import plan_batch
from gptrain.core.strategies import DATA, STRATEGIES, Strategy, StrategyOptions
from gptrain.costs.choice import compare
from gptrain.costs.communication import Traffic, all_reduce_bytes, gather_bytes
from gptrain.costs.hardware import DEVICES
from gptrain.costs.machine import machine_of
from gptrain.costs.optimizers import ADAM, MuonFacts, OptimizerFacts, facts_of
from gptrain.costs.strategies import StrategyCosts
from gptrain.costs.work import Work
from tests.command_line import compose_run

N_PARAMETERS = 61 * 8 + 16 * 8 + 2 * (12 * 8 * 8 + 13 * 8) + 2 * 8
TINY = ["model.vocab_size=61", "model.d_model=8", "model.n_heads=2", "model.n_layers=2",
        "model.max_seq_len=16", "data.seq_len=16", "trainer.precision=32-true"]  # fmt: skip


class OneByteFacts(OptimizerFacts):
    """Each of two ranks updates half of the parameters with 3 FLOPs each, and sends bytes."""

    def flops(self, work: Work) -> float:
        return 3 * sum(work.held) / work.costs.step_ranks

    def traffic(self, work: Work) -> Iterator[Traffic]:
        n_ranks = work.costs.step_ranks
        yield Traffic("signs", DATA, gather_bytes(sum(work.held), n_ranks), calls=1)


class SharedSigns(torch.optim.Optimizer):
    """An optimizer with `n_signs` bytes of state per parameter, and groups of its own."""

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.0, n_signs: int = 1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @staticmethod
    def facts(options: Mapping[str, Any]) -> OptimizerFacts:
        return OneByteFacts(options.get("n_signs", 1), value_bytes=1)

    @classmethod
    def parameter_groups(cls, net, parameters, names, *, bias_lr: float | None = None):
        biases, others = [], []
        for parameter in parameters:
            (biases if names[parameter].endswith("bias") else others).append(parameter)
        return [{"params": others}, {"params": biases, "lr": bias_lr}]


class Unstated(torch.optim.Optimizer):
    """An optimizer that states nothing."""


class DerivedSGD(torch.optim.SGD):
    """A subclass of an optimizer whose facts are known."""


class AveragingOptions(StrategyOptions, extra="forbid"):
    """Options of a strategy that averages the weights of all ranks every `every` steps."""

    every: int


@dataclass(frozen=True)
class AveragingCosts(StrategyCosts[AveragingOptions]):
    """The strategy stores the sum of the weights, and all-reduces it."""

    @property
    def extra_per_parameter(self) -> float:
        return 1

    def traffic(self, work: Work) -> Iterator[Traffic]:
        sent = all_reduce_bytes(sum(work.held) * work.weight_bytes, self.dims.data)
        yield Traffic("averages", DATA, sent / self.options.every, 1 / self.options.every)


@pytest.fixture
def averaging(monkeypatch, tmp_path):
    defaults = "name: averaging\ntimeout_s: 60\nbackend: null\nevery: 4\n"
    (tmp_path / "averaging.yaml").write_text(defaults)
    row = Strategy(
        (DATA,),
        (),
        "outside:Averaging",
        options=AveragingOptions,
        costs=f"{__name__}:AveragingCosts",
        defaults=tmp_path,
    )
    monkeypatch.setitem(STRATEGIES, "averaging", row)


def planned(*words: str) -> dict[str, Any]:
    """Return the estimates of two H100 for a tiny SimpleGPT, by the name of the strategy."""
    run = compose_run(*TINY, *words)
    return compare(run, 16, machine_of(DEVICES["h100_sxm"], 2), 1)["strategies"]


def test_the_plan_of_an_optimizer_from_outside_is_right_without_another_edit():
    rows = planned(
        f"optimizer._target_={__name__}.SharedSigns",
        "~optimizer.betas",
        "~optimizer.eps",
        "~optimizer.fused",
        "+optimizer.n_signs=3",
    )
    ddp = rows["ddp"]
    assert ddp["bytes_per_device"]["weights"] == 4 * N_PARAMETERS
    assert ddp["bytes_per_device"]["optimizer"] == 3 * N_PARAMETERS
    assert ddp["optimizer_flops"] == 3 * N_PARAMETERS / 2
    assert {name.partition(",")[0]: n_bytes for name, n_bytes in ddp["wire"].items()} == {
        "gradients": 4 * N_PARAMETERS,
        "signs": N_PARAMETERS / 2,
    }
    assert rows["fsdp"]["bytes_per_device"]["optimizer"] == pytest.approx(
        3 * N_PARAMETERS / 2, rel=0.01
    )


def test_the_plan_of_a_strategy_from_outside_is_right_without_another_edit(averaging):
    row = planned()["averaging"]
    assert row["bytes_per_device"]["optimizer"] == (2 + 1) * 4 * N_PARAMETERS  # Adam's two, the sum
    (kind,) = row["wire"]
    assert kind.startswith("averages, data axis")
    assert row["wire"][kind] == 4 * N_PARAMETERS / 4


def test_an_optimizer_that_states_nothing_counts_as_adam():
    assert facts_of(f"{__name__}.Unstated", {}) == ADAM
    assert facts_of("no_such_package.Optimizer", {}) == ADAM
    assert facts_of("torch.optim.Adamax", {}) == ADAM
    assert ADAM.bytes_per_parameter(4) == 8


def test_facts_follow_a_class_under_another_path_and_into_a_subclass():
    for path in (f"{__name__}.DerivedSGD", "torch.optim.sgd.SGD", "torch.optim.SGD"):
        assert facts_of(path, {"momentum": 0.9}).states_per_parameter == 1
        assert facts_of(path, {}).states_per_parameter == 0
    assert facts_of("gptrain.optim.muon.Muon", {}) == MuonFacts()


def test_an_optimizer_from_outside_makes_its_own_parameter_groups():
    words = (
        f"optimizer._target_={__name__}.SharedSigns", "~optimizer.betas", "~optimizer.eps",
        "~optimizer.fused", "optimizer.lr=0.5", "+optimizer.bias_lr=0.25",
        "optimizer.lr_scaling=linear", "optimizer.reference_batch_size=2",
        "optimizer.weight_decay=0.0",
    )  # fmt: skip
    run = compose_run(*words)
    net = nn.Linear(3, 2)
    optimizer = build_optimizer(run, plan_batch(4, None, 1, 1), net)  # twice the reference
    matrices, biases = optimizer.param_groups
    assert (matrices["params"], matrices["lr"]) == ([net.weight], 1.0)
    assert (biases["params"], biases["lr"]) == ([net.bias], 0.5)
    # The keys of the groups are allowed, and the error about a misspelt key lists them.
    for more, allowed in ((), []), (("+optimizer.bais_lr=1",), ["n_signs", "bias_lr"]):
        checked = check_config(resolved(compose_command([*words, *more])))
        problems = list(check_classes(checked))
        assert [key for p in problems for key in p.allowed.split(", ")[-2:]] == allowed

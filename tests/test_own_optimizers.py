"""An optimizer of torch by its name alone, and one from outside with groups of its own."""

from __future__ import annotations

import pytest
import torch

from gptrain.assemble.module import build_optimizer, peak_lr
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import BatchPlan
from gptrain.core.schema import OptimizerConfig, RunConfig
from tests.command_line import compose_run

FOUR = BatchPlan(4, 1, 1)  # twice the reference


class Own(torch.optim.Optimizer):
    """An optimizer with groups of its own."""

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @classmethod
    def parameter_groups(cls, net, parameters, names, *, bias_lr: float | None = None):
        biases, others = [], []
        for parameter in parameters:
            (biases if names[parameter].endswith("bias") else others).append(parameter)
        return [{"params": others}, {"params": biases, "lr": bias_lr}]


def as_if_from_a_yaml(**group) -> RunConfig:
    """Return a config whose optimizer group is a yaml file with these keys."""
    defaults = {"lr": None, "weight_decay": None, "lr_scaling": "linear", "reference_batch_size": 2}
    optimizer = OptimizerConfig.model_validate(defaults | group)
    return compose_run("model=gpt_nano").changed({"optimizer": optimizer})


def test_an_optimizer_from_outside_makes_its_own_parameter_groups():
    run = as_if_from_a_yaml(_target_=f"{__name__}.Own", lr=0.5, bias_lr=0.25, weight_decay=0.0)
    net = torch.nn.Linear(3, 2)
    matrices, biases = build_optimizer(run, FOUR, net).param_groups
    assert (matrices["params"], matrices["lr"]) == ([net.weight], 1.0)
    assert (biases["params"], biases["lr"]) == ([net.bias], 0.5)


@pytest.mark.parametrize("name", ["NAdam", "SGD"])
def test_an_optimizer_of_torch_needs_only_its_name(name):
    """The learning rate is scaled to the batch, and only matrices get weight decay."""
    cfg = as_if_from_a_yaml(_target_=f"torch.optim.{name}", weight_decay=0.3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(cfg, FOUR, net)
    default = getattr(torch.optim, name)(net.parameters())
    assert type(optimizer) is type(default)
    assert optimizer.defaults["lr"] == 2 * default.defaults["lr"]  # 4 sequences / 2
    groups = [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert groups == [(0.3, 1), (0.0, 3)]


def test_a_decay_that_an_optimizer_does_not_know_is_an_error_and_not_silence():
    cfg = as_if_from_a_yaml(_target_="torch.optim.Rprop", weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"optim.Rprop: .* argument 'weight_decay'"):
        build_optimizer(cfg, FOUR, torch.nn.Linear(2, 2))
    assert peak_lr(cfg.changed({"optimizer.weight_decay": None}), FOUR) == 0.02

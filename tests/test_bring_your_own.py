"""User code and data: a net, an optimizer, a schedule, and token files of other programs."""

from __future__ import annotations

import pytest
import torch

from gptrain.assemble.module import build_optimizer, peak_lr
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import BatchPlan
from gptrain.core.schema import OptimizerConfig, RunConfig
from tests.command_line import compose_run


def as_if_from_a_yaml(**group) -> RunConfig:
    """Return a config whose optimizer group is a yaml file with these keys."""
    defaults = {"lr": None, "weight_decay": None, "lr_scaling": "linear", "reference_batch_size": 2}
    optimizer = OptimizerConfig.model_validate(defaults | group)
    return compose_run("model=gpt_nano").changed({"optimizer": optimizer})


@pytest.mark.parametrize("name", ["Adafactor", "NAdam", "SGD", "Adagrad"])
def test_an_optimizer_of_torch_needs_only_its_name(name):
    """The learning rate is scaled to the batch, and only matrices get weight decay."""
    cfg = as_if_from_a_yaml(_target_=f"torch.optim.{name}", weight_decay=0.3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(cfg, BatchPlan(4, 1, 1), net)
    default = getattr(torch.optim, name)(net.parameters())
    assert type(optimizer) is type(default)
    assert optimizer.defaults["lr"] == 2 * default.defaults["lr"]  # 4 sequences / 2
    groups = [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert groups == [(0.3, 1), (0.0, 3)]
    cfg = cfg.changed({"optimizer.weight_decay": None})
    decay = build_optimizer(cfg, BatchPlan(4, 1, 1), net).param_groups[0]["weight_decay"]
    assert decay == default.defaults["weight_decay"]


def test_a_decay_that_an_optimizer_does_not_know_is_an_error_and_not_silence():
    cfg = as_if_from_a_yaml(_target_="torch.optim.Rprop", weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"optim.Rprop: .* argument 'weight_decay'"):
        build_optimizer(cfg, BatchPlan(4, 1, 1), torch.nn.Linear(2, 2))
    cfg = cfg.changed({"optimizer.weight_decay": None})
    assert peak_lr(cfg, BatchPlan(4, 1, 1)) == 0.02

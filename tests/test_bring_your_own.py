"""User code and data: a net, an optimizer, a schedule, and token files of other programs."""

from __future__ import annotations

import textwrap

import pytest
import torch

from gptrain.assemble.optimizer import build_optimizer, peak_lr
from gptrain.assemble.schedule import build_schedule
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import BatchPlan, RunLengths
from gptrain.core.schema import OptimizerConfig, RunConfig
from tests.command_line import compose_run

LAB = '''
    import torch
    from torch import nn


    class LSTM(nn.Module):
        """tokens (B, T) -> logits (B, T, V), and nothing else of the contract."""

        def __init__(self, vocab_size, width, dropout=0.1):
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, width)
            _, rate = (x.item() for x in torch.linspace(0, dropout, 2))  # not on the meta device
            self.dropout = nn.Dropout(rate)
            self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
            self.out = nn.Linear(width, vocab_size)

        def forward(self, tokens):
            return self.out(self.lstm(self.dropout(self.embedding(tokens)))[0])


    class Signs(torch.optim.Optimizer):
        """Steps by the sign of a running mean; has a momentum and no decay."""

        def __init__(self, params, lr=1e-3, momentum=0.9):
            super().__init__(params, {"lr": lr, "momentum": momentum})

        @torch.no_grad()
        def step(self, closure=None):
            if closure is not None:  # as torch asks of all: Lightning computes the gradients there
                with torch.enable_grad():
                    closure()
            for group in self.param_groups:
                for p in group["params"]:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 - group["momentum"])
                    p.sub_(mean.sign(), alpha=group["lr"])


    class Measures(Signs):
        """Looks at the weights before the first step."""

        def __init__(self, params, lr=1e-3):
            super().__init__(params, lr)
            self.norms = [float(p.norm()) for group in self.param_groups for p in group["params"]]


    def halving(step):
        return 0.5 ** (step // 2)


    def to_the_end(step, *, total_steps, power=1.0):
        return (1 - step / total_steps) ** power
'''
YAML = {
    "model/lstm.yaml": "_target_: lab.LSTM\nvocab_size: 256\nwidth: 16",
    "optimizer/signs.yaml": "_target_: lab.Signs",
    "optimizer/measures.yaml": "_target_: lab.Measures",
    "scheduler/halving.yaml": "_target_: lab.halving",
    "scheduler/to_the_end.yaml": "_target_: lab.to_the_end\npower: 2.0",
}


@pytest.fixture
def lab(tmp_path, monkeypatch) -> tuple[str, ...]:
    """A user's own files; the words that bring them in."""
    (tmp_path / "lab.py").write_text(textwrap.dedent(LAB))
    for name, text in YAML.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# Ours.\n{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "--config-dir", str(tmp_path / "conf")


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


def factor(cfg, n_steps: int, step: int) -> float:
    """Return the factor of the learning rate at a step of a run of `n_steps` steps."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    made = build_schedule(
        cfg, RunLengths(BatchPlan(1, 1, 1), 1, n_steps, n_steps, n_steps), optimizer
    )
    return made["scheduler"].lr_lambdas[0](step)

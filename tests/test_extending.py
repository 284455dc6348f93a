"""An optimizer from outside the library, which states what the planner must know."""

from __future__ import annotations

import torch
from torch import nn

from gptrain.assemble.module import build_optimizer
from gptrain.core.lengths import plan_batch
from tests.command_line import compose_run

TINY = ["model.vocab_size=61", "model.d_model=8", "model.n_heads=2", "model.n_layers=2",
        "model.max_seq_len=16", "data.seq_len=16", "trainer.precision=32-true"]  # fmt: skip


class SharedSigns(torch.optim.Optimizer):
    """An optimizer with three bytes of state per parameter, and groups of its own."""

    states_per_parameter = 0.75

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.0, n_signs: int = 1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @classmethod
    def parameter_groups(cls, net, parameters, names, *, bias_lr: float | None = None):
        biases, others = [], []
        for parameter in parameters:
            (biases if names[parameter].endswith("bias") else others).append(parameter)
        return [{"params": others}, {"params": biases, "lr": bias_lr}]


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

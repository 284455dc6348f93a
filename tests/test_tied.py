"""A tied table gets from one node of autograd what it gets from two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gptrain.lit import LanguageModel
from gptrain.models import SimpleGPT
from gptrain.optim import constant

V = 61


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch):
    """A small table is left alone: the one node costs more time than it saves memory."""
    monkeypatch.setattr("gptrain.lit.module.LARGE_BYTES", 0)


class Untied(SimpleGPT):
    """With a head of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


def gradients(net: nn.Module, shares: bool) -> dict[str, torch.Tensor]:
    module = LanguageModel(net, torch.optim.AdamW, constant)
    if not shares:
        module.tied = None
    torch.manual_seed(1)
    tokens = torch.randint(V, (3, 16))
    tokens[:, 1] = tokens[:, 0]  # rows that are looked up twice
    for _ in range(2):  # accumulated
        module.loss(tokens, torch.randint(V, (3, 16))).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("kind", [SimpleGPT, Untied])
def test_gradients_are_those_of_two_uses(kind):
    torch.manual_seed(0)
    net = kind(V, 32, 4, 2, 16, 0.0)
    torch.manual_seed(0)
    twin = kind(V, 32, 4, 2, 16, 0.0)
    assert (LanguageModel(net, torch.optim.AdamW, constant).tied is None) == (kind is Untied)
    truth = gradients(twin, shares=False)
    for name, gradient in gradients(net, shares=True).items():
        # Sums of a few fp32 numbers in another order.
        torch.testing.assert_close(gradient, truth[name], rtol=1e-5, atol=1e-7, msg=name)


def test_the_embedding_is_as_it_was_after_a_loss():
    net = SimpleGPT(V, 32, 4, 2, 16, 0.0)
    module = LanguageModel(net, torch.optim.AdamW, constant)
    module.loss(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64))
    assert "forward" not in vars(net.token_embedding)
    assert "_Tied" not in str(net.token_embedding(torch.zeros(1).long()).grad_fn)

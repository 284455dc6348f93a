"""A net is made on its device with the weights of one process, whatever it offers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gptrain.parallel.placement import make_net_on


class Tied(nn.Module):
    """As users write them: a head that is its table, and initial weights by name."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight

    def init_parameter(self, name, tensor):
        tensor.fill_(len(name))


def test_a_tied_weight_stays_one_parameter():
    net = make_net_on("cpu", Tied, lambda net: None)
    assert net.head.weight is net.table.weight
    assert (net.table.weight == len("table.weight")).all()


@pytest.mark.parametrize(
    ("look", "n_made"),
    [(lambda x: x.sum().item(), 2), (lambda x: x.detach().numpy(), 2), (lambda x: x.ndim, 3)],
)
def test_a_net_that_needs_real_numbers_is_made_once_with_those_of_one_process(look, n_made):
    """The shape of its weight can be known before, on the meta device, from which it is made."""
    made = []

    class Looks(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.seed = torch.rand((), device="cpu")  # drawn again by the second attempt
            made.append(look(self.weight))  # a tensor on the meta device has no values

    torch.manual_seed(0)
    expected, draw = Looks(), torch.rand(())
    torch.manual_seed(0)
    net = make_net_on("cpu", Looks, lambda net: None)
    assert torch.equal(net.weight, expected.weight) and torch.equal(torch.rand(()), draw)
    assert len(made) == n_made and net.seed == expected.seed

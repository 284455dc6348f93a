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


@pytest.mark.parametrize("look", [lambda x: x.sum().item(), lambda x: x.detach().numpy()])
def test_a_net_that_needs_real_numbers_is_made_once_with_those_of_one_process(look):
    made = []

    class Looks(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            made.append(look(self.weight))  # a tensor on the meta device has no values

    torch.manual_seed(0)
    expected, draw = Looks(), torch.rand(())
    torch.manual_seed(0)
    net = make_net_on("cpu", Looks, lambda net: None)
    assert torch.equal(net.weight, expected.weight) and torch.equal(torch.rand(()), draw)
    assert len(made) == 2

"""Recomputing activations, and compiling, change neither numbers nor names."""

import pytest
import torch

from gptrain.models import SimpleGPT
from gptrain.parallel.activation import apply_activation_checkpointing, apply_compile
from gptrain.parallel.fit import Unfit

B, T, V = 2, 16, 61


def make_net(mode):
    torch.manual_seed(0)
    net = SimpleGPT(V, 32, n_heads=4, n_layers=4, max_seq_len=T, dropout=0.1)
    apply_activation_checkpointing(net, mode)
    return net


def gradients(net):
    torch.manual_seed(1)
    net(torch.arange(B * T).view(B, T)).square().sum().backward()
    return [parameter.grad for parameter in net.parameters()]


def saved_bytes(net):
    """Bytes of the tensors that the backward pass keeps alive; parameters count alike for all."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(torch.arange(B * T).view(B, T))
    return sum(kept.values())


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_activations_are_the_same_also_under_dropout(mode):
    for mine, expected in zip(gradients(make_net(mode)), gradients(make_net("none")), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_names_of_parameters_stay(mode):
    net = make_net(mode)
    apply_compile(net, "blocks")
    assert list(net.state_dict()) == list(make_net("none").state_dict())


def test_full_checkpointing_keeps_less_than_half():
    assert saved_bytes(make_net("full")) < saved_bytes(make_net("none")) / 2


def test_a_net_without_blocks_is_told_what_it_lacks():
    net = torch.nn.Linear(2, 2)
    with pytest.raises(Unfit, match="needs `blocks`"):
        apply_activation_checkpointing(net, "full")
    with pytest.raises(Unfit, match="needs `blocks`"):
        apply_compile(net, "blocks")


def test_unknown_modes_are_refused():
    with pytest.raises(ValueError, match="allowed: none, selective, full"):
        make_net("some")
    with pytest.raises(ValueError, match="allowed: none, blocks, model"):
        apply_compile(make_net("none"), "some")

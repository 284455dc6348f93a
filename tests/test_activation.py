"""Recomputing activations, and compiling, change neither numbers nor names."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gptrain.models import SimpleGPT
from gptrain.parallel.activation import apply_activation_checkpointing, apply_compile

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


class Alive(TorchDispatchMode):
    """Bytes that operations have made and something still holds, autograd's graph or another."""

    def __init__(self, net):
        super().__init__()
        self.made, self.weights = {}, {p.untyped_storage().data_ptr() for p in net.parameters()}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def n_bytes(self):
        made = (made for start, made in self.made.items() if start not in self.weights)
        return sum(n for storage, n in made if not storage.expired())


def saved_bytes(mode):
    """Bytes that a forward pass leaves for the backward pass."""
    net = make_net(mode)
    with Alive(net) as alive:
        logits = net(torch.arange(B * T).remainder(V).view(B, T))
    assert logits.requires_grad
    return alive.n_bytes - logits.nbytes


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_activations_are_the_same_also_under_dropout(mode):
    for gradient, expected in zip(
        gradients(make_net(mode)), gradients(make_net("none")), strict=True
    ):
        assert torch.equal(gradient, expected)


def test_names_of_parameters_stay():
    net = make_net("full")
    apply_compile(net, "blocks")
    assert list(net.state_dict()) == list(make_net("none").state_dict())


@pytest.mark.parametrize(
    "mode, names", [("blocks", 4 * ["forward"]), ("model", ["forward", "hidden"])]
)
def test_what_the_loss_calls_is_what_is_compiled(mode, names, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda method: compiled.append(method) or "compiled")
    net = make_net("none")
    apply_compile(net, mode)
    assert [method.__name__ for method in compiled] == names
    parts = net.blocks.children() if mode == "blocks" else [net]
    assert all(getattr(part, name) == "compiled" for part in parts for name in set(names))


def test_the_more_is_recomputed_the_less_is_kept():
    none, selective, full = map(saved_bytes, ("none", "selective", "full"))
    assert full < selective / 2 and selective < 0.7 * none

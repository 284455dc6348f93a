"""Tensor and sequence parallelism: weights split by columns or rows, activations by positions.

The first matrices of attention and MLP are split by outputs and the last by inputs, so that a rank
computes its own heads and its own part of the MLP without communication. The partial sums are
reduce-scattered into shards of the sequence. Norms, dropout and the residual stream work on these
shards, which are all-gathered after each norm. Gradients take the reverse way. Every rank applies
dropout to its own positions or heads, so the ranks use different seeds. Source: Shoeybi et al.
2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.

Parameters are DTensors, for the optimizer, FSDP and checkpoints. The layers compute on local shards
with the collectives of this file. DTensor's own SequenceParallel requires that T is a multiple of
the number of ranks, and its dispatcher runs at every operation. This file pads the sequence at its
end instead, which does not change the logits of a causal net.
"""

# B batch, T time, D d_model, V vocab, C tokens of a chunk, n ranks of the tensor axis,
# v rows of V on this rank, T' = T padded to a multiple of n, t = T' / n

from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gptrain.loss import chunked_loss_sum, cross_entropy_in_place
from gptrain.models.attention import SequenceLayout
from gptrain.parallel.requirements import Net

# Functional collectives have gradients, also where they are compiled: in torch 2.11 along the first
# dimension only. torch 2.13 renamed them.
_KIND = "single" if hasattr(functional, "all_gather_single_autograd") else "tensor"
_all_gather = getattr(functional, f"all_gather_{_KIND}_autograd")
_reduce_scatter = getattr(functional, f"reduce_scatter_{_KIND}_autograd")


def apply_tensor_parallel(net: Net, mesh: DeviceMesh) -> None:
    """Split a net over the tensor axis, in place, as `net.tensor_plan` says.

    `net(tokens)` and `net.hidden(tokens)` still take and return full tensors, and are then
    collective: all ranks of the axis pass the same tokens. After the last backward pass of a step,
    the caller must sum the gradients of `partial_parameters` over the axis.

    Args:
        net: Net that `check_fit` has accepted, with the same weights on all ranks or on the meta
            device.
        mesh: Mesh with an axis "tensor".
    """
    group = mesh["tensor"].get_group()
    plan = net.tensor_plan.items()
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(net.named_modules()):
        role = next((role for pattern, role in plan if fnmatch(name, pattern)), None)
        role_class, split_dims = (None, {}) if role is None else _ROLES[role]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in sharded:
                sharded[parameter] = _shard(parameter, split_dims.get(key), mesh)
            setattr(module, key, sharded[parameter])
        if role_class is not None:
            module.__class__ = _mixed_class(role_class, type(module))
            module.tensor_group = group
    wrap_methods(net, lambda method: partial(_without_padding, method, group.size()))


def wrap_methods(net: Net, wrap: Callable[[Callable], Callable]) -> None:
    """Replace `forward` of a net, and `hidden` if the net has it, by the result of `wrap`."""
    for name in ("forward", "hidden"):  # the chunked loss calls `hidden`
        if hasattr(net, name):
            setattr(net, name, wrap(getattr(net, name)))


def partial_parameters(net: Net) -> list[nn.Parameter]:
    """Return the parameters that every tensor rank holds in full, with a part of the gradient.

    `net` is a net after `apply_tensor_parallel`. The full gradient of such a parameter is the sum
    of the gradients of all ranks of the axis.
    """
    layers = (module for module in net.modules() if isinstance(module, _Role))
    parameters = (p for layer in layers for p in layer.parameters(recurse=False))
    # The last axis of a mesh is that of tensors. FSDP may have another before it.
    return [p for p in parameters if cast(Any, p).placements[-1].is_replicate()]


def _shard(parameter: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter as a DTensor on the tensor axis, which requires gradients as before."""
    placements = [Replicate() if dim is None else Shard(dim)]
    # src_data_rank=None sends nothing: the full parameter is identical on all ranks.
    shard = distribute_tensor(parameter.detach(), mesh["tensor"], placements, src_data_rank=None)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _without_padding(method, n_ranks: int, tokens: Tensor, *arguments, **options) -> Tensor:
    """Call a method of the net and cut its result to the length of the tokens."""
    if layout := options.get("layout"):
        options["layout"] = pad_layout(layout, n_ranks)
    result = method(tokens, *arguments, **options)  # (B, T', ...)
    n_tokens = tokens.shape[1]
    # FSDP warns about views.
    return result if result.shape[1] == n_tokens else result[:, :n_tokens].clone()


def pad_layout(layout: SequenceLayout, n_ranks: int) -> SequenceLayout:
    """Return a sequence layout that is padded at its end to a multiple of `n_ranks` positions.

    No token of the sequences attends to the padding. A layout that needs none is returned
    unchanged.
    """
    if layout.positions.shape[-1] % n_ranks == 0:
        return layout
    if layout.documents is None:
        return SequenceLayout(_pad_to_multiple(layout.positions, n_ranks))
    last = layout.documents[:, -1:]  # any other number might be that of a document further ahead
    padding = last.expand(-1, -layout.documents.shape[1] % n_ranks)
    return SequenceLayout.of_documents(torch.cat((layout.documents, padding), 1))


# Each role is a class that is mixed in front of the class of the layer. If each instance got a
# `forward` function of its own instead, torch.compile would compile every block again.


class _Role(nn.Module):
    """Base class of the roles of layers under tensor parallelism."""

    weight: DTensor
    bias: DTensor | None
    tensor_group: dist.ProcessGroup
    layer_forward: Callable[..., Tensor]


class _Colwise(_Role):
    """Linear layer that is split by outputs: (..., in) -> this rank's (..., out / n)."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to_local()
        return F.linear(x, self.weight.to_local(), bias)


class _Rowwise(_Role):
    """Linear layer that is split by inputs: columns (B, T', in / n) -> positions (B, t, out)."""

    def forward(self, x: Tensor) -> Tensor:
        y = _scatter_sequence(F.linear(x, self.weight.to_local()), self.tensor_group)
        return y if self.bias is None else y + self.bias.to_local().to(y.dtype)


class _PerHead(_Role):
    """Norm of q or k that normalizes this rank's heads (..., d_head), without a collective."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_forward(_LocalParameters(self), x)


class _LocalParameters:
    """View of a layer without children, in which DTensors appear as their local shards."""

    def __init__(self, layer: nn.Module):
        self.layer = layer

    def __getattr__(self, name: str):
        value = getattr(self.layer, name)
        return value.to_local() if isinstance(value, DTensor) else value


class _Sequence(_PerHead):
    """Norm of this rank's positions (B, t, D) that returns the full sequence (B, T', D)."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        # Under autocast norms return fp32, and the next matrix multiplication casts it. Casting
        # before the all-gather sends half of the bytes.
        if torch.is_autocast_enabled(y.device.type):
            y = y.to(torch.get_autocast_dtype(y.device.type))
        return gather_sequence(y, self.tensor_group)


class _PositionEmbedding(_Role):
    """Table of positions that looks up only this rank's positions, (..., T) -> (..., t, D)."""

    def forward(self, positions: Tensor) -> Tensor:
        n_ranks = self.tensor_group.size()
        shards = _pad_to_multiple(positions, n_ranks).chunk(n_ranks, dim=-1)
        return F.embedding(shards[self.tensor_group.rank()], self.weight.to_local())


class _VocabEmbedding(_Role):
    """Token embedding whose rows are split over the ranks, (B, T) -> (B, t, D)."""

    def forward(self, tokens: Tensor) -> Tensor:
        n_ranks = self.tensor_group.size()
        n_rows = -(-self.weight.shape[0] // n_ranks)  # torch.chunk rounds up
        rows = _pad_to_multiple(tokens, n_ranks) - self.tensor_group.rank() * n_rows
        weight = self.weight.to_local()  # (v, D)
        is_on_other_rank = (rows < 0) | (rows >= weight.shape[0])
        partial_sum = F.embedding(rows.masked_fill(is_on_other_rank, 0), weight)
        partial_sum = partial_sum.masked_fill(is_on_other_rank[..., None], 0.0)
        return _scatter_sequence(partial_sum, self.tensor_group)


class _VocabHead(_Colwise):
    """Head that is split by outputs, with the full logits (B, T', V) on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)  # (B, T', v)
        full = torch.empty(*x.shape[:-1], self.weight.shape[0], device="meta")
        sizes: dict[str, Any] = {"shape": full.shape, "stride": full.stride()}
        # Every rank computes the same function of the full logits, so the backward pass of
        # full_tensor takes this rank's columns of the gradient, without a sum over ranks.
        columns = DTensor.from_local(logits, self.weight.device_mesh, [Shard(-1)], **sizes)
        return columns.full_tensor()  # (B, T', V)


@cache
def _mixed_class(role: type, layer: type[nn.Module]) -> type:
    """Return a class that inherits from a role and then from a layer's class."""
    return type(layer.__name__, (role, layer), {"layer_forward": staticmethod(layer.forward)})


# Role -> (class of the role, {parameter name: split dimension})
_ROLES: dict[str, tuple[type, dict[str, int]]] = {
    "colwise": (_Colwise, {"weight": 0, "bias": 0}),
    "rowwise": (_Rowwise, {"weight": 1}),
    "sequence": (_Sequence, {}),
    "per_head": (_PerHead, {}),
    "position_embedding": (_PositionEmbedding, {}),
    "vocab_embedding": (_VocabEmbedding, {"weight": 0}),
    "vocab_head": (_VocabHead, {"weight": 0, "bias": 0}),
}


def gather_sequence(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather the shards (..., t, D) of sequences into (..., n t, D), in rank order. Collective.

    All n ranks of the group pass shards of one shape. The backward pass sums the gradients of all
    ranks, and gives each rank those of its shard.
    """
    full = functional.wait_tensor(_all_gather(shard.contiguous(), 0, group))
    full = full.unflatten(0, (group.size(), -1))  # (n, ..., t, D)
    return full.movedim(0, -3).flatten(-3, -2)  # (..., T', D)


def _scatter_sequence(partial_sum: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum tensors (..., T', D) over the ranks, and return own positions (..., t, D). Collective."""
    shards = partial_sum.unflatten(-2, (group.size(), -1)).movedim(-3, 0)  # (n, ..., t, D)
    shards = shards.flatten(0, 1).contiguous()
    return functional.wait_tensor(_reduce_scatter(shards, "sum", 0, group))  # (..., t, D)


def vocab_parallel_loss(hidden: Tensor, head_weight: DTensor, *args, **kwargs) -> Tensor:
    """Return the sum of the losses under a head whose rows the tensor ranks divide, a scalar.

    All ranks of the head's mesh must call it, with the same hidden states and targets, and get the
    same sum. The gradient of `hidden` covers only this rank's part of the vocabulary: the backward
    pass of `gather_sequence` sums it.

    Args:
        hidden: Hidden states, (..., D).
        head_weight: Weight of the head, (V, D), a DTensor that is sharded by rows.
        args, kwargs: Further arguments of `loss.chunked_loss_sum`: the targets, and the options.
    """
    mesh, vocab_size = head_weight.device_mesh, head_weight.shape[0]
    operations = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
    cross_entropy = partial(
        cross_entropy_in_place,
        start=mesh.get_local_rank() * -(-vocab_size // mesh.size()),
        vocab_size=vocab_size,
        all_reduce=lambda tensor, name: dist.all_reduce(tensor, operations[name], mesh.get_group()),
    )
    kwargs["cross_entropy"] = cross_entropy
    return chunked_loss_sum(hidden, head_weight.to_local(), *args, **kwargs)


def _pad_to_multiple(tokens: Tensor, n: int) -> Tensor:
    """Pad indices (..., T) with index 0 to (..., T'): T rounded up to a multiple of n."""
    return F.pad(tokens, (0, -tokens.shape[-1] % n))

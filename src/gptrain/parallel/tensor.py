"""Tensor parallelism: matrices split by columns or rows over ranks, and the sequence between them.

A layer's first matrices are split by outputs, its last by inputs, so that a rank computes whole
heads and its part of the MLP alone. Partial sums are reduce-scattered into slices of the sequence,
on which norms, dropout and the residual stream work, and gathered again after each norm; the
gradients go the reverse way. Each collective sends (n-1)/n of the whole tensor per rank, half of an
all-reduce. Dropout only sees what this rank alone holds: ranks draw from different seeds.
Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.

Parameters become DTensors (for the optimizer, FSDP and checkpoints); layers compute on their local
parts with the collectives below. DTensor's own sequence parallelism needs T to be a multiple of the
ranks, and pays its dispatcher at every operation; here the sequence is padded at its end, which a
causal net cannot see.

The loss takes a rank's columns of the logits, a chunk of tokens at a time, with their gradients in
the same pass; ranks exchange three numbers a token.
"""

# V vocab, v this rank's part of it, D d_model, B batch, T time, C tokens of a chunk,
# T' time padded to a multiple of n ranks, t = T' / n

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache, partial
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gptrain.core.strategies import ParallelDims, StrategyOptions
from gptrain.loss import chunked_next_token_loss, cross_entropy_in_place
from gptrain.parallel.requirements import IncompatibleModelError, Net

# Renamed in torch 2.13, which warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def apply_tensor_parallel(net: nn.Module, mesh: DeviceMesh) -> None:
    """Split the net in place over the mesh's "tensor" axis, as its tensor_plan says.

    forward still gives whole logits (B, T, V) on every rank. `hidden` gives whole hidden states
    whose gradient is summed over ranks: take the loss of `vocab_parallel_loss`, which knows.
    A weight tied to another stays tied.
    """
    group, net = mesh["tensor"].get_group(), cast(Net, net)
    roles = dict(_roles(net))
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(net.named_modules()):
        role, _, split_dims = _ROLES.get(roles.get(name), (None, (), {}))
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in sharded:
                sharded[parameter] = _shard(parameter, split_dims.get(key), mesh)
            setattr(module, key, sharded[parameter])
        if role is not None:
            module.__class__ = _mixed(role, type(module))
            module.tensor_group = group
    net.forward = partial(_without_padding, net.forward)
    if hasattr(net, "hidden"):
        net.hidden = partial(_without_padding, net.hidden)


def check_tensor_parallel(net: Net, options: StrategyOptions, dims: ParallelDims) -> None:
    """Raises: IncompatibleModelError if the net cannot be split over so many ranks; says
    what it lacks.
    """
    for name in ("n_kv_heads", "n_heads"):  # those of k and v may be fewer
        heads = getattr(net, name, net.n_heads)
        if heads % dims.tensor:
            allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise IncompatibleModelError(
                "strategy.tensor_parallel_size",
                f"{dims.tensor} ranks do not divide {name}={heads}, each must hold whole heads; "
                f"allowed: {allowed}",
            )
    unknown = sorted(set(net.tensor_plan.values()) - set(_ROLES))
    if unknown:
        raise IncompatibleModelError(
            "strategy.name",
            f"{type(net).__name__}.tensor_plan has roles {', '.join(unknown)}; "
            f"allowed: {', '.join(_ROLES)}",
        )
    for name, role in _roles(net):
        layer, known = net.get_submodule(name), _ROLES[role][1]
        fits = isinstance(layer, known) if known is _NORMS else type(layer) in known
        if not fits or (role == "vocab_head" and layer.bias is not None):
            raise IncompatibleModelError(
                "strategy.name",
                f"tensor_plan makes {name} {role}: it is a {type(layer).__name__}, the role is for "
                f"{' and '.join(kind.__name__ for kind in known)}"
                f"{' without bias' if role == 'vocab_head' else ''}",
            )


def partial_parameters(net: nn.Module) -> list[nn.Parameter]:
    """Parameters whose gradients are sums over one rank's slice of the sequence or heads only.

    Norms, the position table, and biases added to slices: to be summed over the tensor group once
    per optimizer step (`gradients.sum_gradients`).
    """
    found: list[nn.Parameter] = []
    for name, role in _roles(cast(Net, net)):
        module = net.get_submodule(name)
        if role in ("sequence", "per_head", "position_embedding"):
            found += module.parameters(recurse=False)
        elif role == "rowwise" and isinstance(module.bias, nn.Parameter):
            found.append(module.bias)
    return found


def _roles(net: Net) -> Iterator[tuple[str, str]]:
    for name, _ in net.named_modules():
        for pattern, role in net.tensor_plan.items():
            if fnmatch(name, pattern):
                yield name, role
                break


def _shard(parameter: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    placements = [Replicate() if dim is None else Shard(dim)]
    whole = parameter.detach()  # alike on all ranks
    shard = distribute_tensor(whole, mesh["tensor"], placements, src_data_rank=None)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _without_padding(method, tokens: Tensor, *more) -> Tensor:
    y, n_tokens = method(tokens, *more), tokens.shape[1]  # (B, T', ...)
    return y if y.shape[1] == n_tokens else y[:, :n_tokens].clone()  # FSDP warns of views


# Roles are classes mixed in front of a layer's own: were they functions put on the instances,
# torch.compile would compile each block anew.


class _Role(nn.Module):  # attributes of the layers, for a type checker
    weight: DTensor
    bias: DTensor | None
    num_embeddings: int
    out_features: int
    tensor_group: dist.ProcessGroup
    of_class: Callable[..., Tensor]


class _Colwise(_Role):
    def forward(self, whole: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to_local()
        return F.linear(whole, self.weight.to_local(), bias)


class _Rowwise(_Role):
    def forward(self, part: Tensor) -> Tensor:
        y = scatter_sequence(F.linear(part, self.weight.to_local()), self.tensor_group)
        return y if self.bias is None else y + self.bias.to_local().to(y.dtype)


class _PerHead(_Role):  # a norm, computed as its class does
    def forward(self, part: Tensor) -> Tensor:
        return self.of_class(_WithLocal(self), part)


class _WithLocal:
    """What the forward of a layer without children sees of it, with local parameters."""

    def __init__(self, layer: nn.Module):
        self.layer = layer

    def __getattr__(self, name: str):
        value = getattr(self.layer, name)
        return value.to_local() if isinstance(value, DTensor) else value


class _Sequence(_PerHead):
    def forward(self, part: Tensor) -> Tensor:
        y = super().forward(part)
        if torch.is_autocast_enabled(y.device.type):  # norms give fp32, the matrices after it cast
            y = y.to(torch.get_autocast_dtype(y.device.type))
        return gather_sequence(y, self.tensor_group)


class _PositionEmbedding(_Role):
    def forward(self, positions: Tensor) -> Tensor:
        size, rank = self.tensor_group.size(), self.tensor_group.rank()
        mine = pad_to_multiple(positions, size).chunk(size, dim=-1)[rank]
        return F.embedding(mine, self.weight.to_local())


class _VocabEmbedding(_Role):
    def forward(self, tokens: Tensor) -> Tensor:
        size, rank = self.tensor_group.size(), self.tensor_group.rank()
        n_rows = -(-self.num_embeddings // size)  # torch.chunk's
        rows = pad_to_multiple(tokens, size) - rank * n_rows
        weight = self.weight.to_local()  # (v, D)
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        partial_sum = F.embedding(rows.masked_fill(elsewhere, 0), weight)
        partial_sum = partial_sum.masked_fill(elsewhere[..., None], 0.0)
        return scatter_sequence(partial_sum, self.tensor_group)


class _VocabHead(_Role):
    def forward(self, whole: Tensor) -> Tensor:
        logits = F.linear(whole, self.weight.to_local())  # (B, T', v)
        like = logits.new_empty(*whole.shape[:-1], self.out_features, device="meta")
        shape, stride = like.shape, like.stride()
        mesh = self.weight.device_mesh
        # What follows is computed alike on every rank: backward takes this rank's columns.
        parts = DTensor.from_local(logits, mesh, [Shard(-1)], shape=shape, stride=stride)
        return parts.full_tensor()  # (B, T', V)


@cache
def _mixed(role: type, layer: type[nn.Module]) -> type:
    return type(layer.__name__, (role, layer), {"of_class": staticmethod(layer.forward)})


_NORMS = (nn.LayerNorm, nn.RMSNorm)  # or a class of either
_ROLES = {  # role -> its class, the layers that it knows, the dimensions in which they are split
    "colwise": (_Colwise, (nn.Linear,), {"weight": 0, "bias": 0}),
    "rowwise": (_Rowwise, (nn.Linear,), {"weight": 1}),
    "sequence": (_Sequence, _NORMS, {}),
    "per_head": (_PerHead, _NORMS, {}),
    "position_embedding": (_PositionEmbedding, (nn.Embedding,), {}),
    "vocab_embedding": (_VocabEmbedding, (nn.Embedding,), {"weight": 0}),
    "vocab_head": (_VocabHead, (nn.Linear,), {"weight": 0}),
}


def gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Slices (..., t, D) of all ranks side by side, (..., T', D). Backward sums over ranks."""
    return _AlongSequence.apply(part, group, True)


def scatter_sequence(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice (..., t, D) of the sum over ranks of (..., T', D). Backward gathers."""
    return _AlongSequence.apply(partial, group, False)


def vocab_parallel_loss(hidden: Tensor, head_weight: Tensor, targets: Tensor, **options) -> Tensor:
    """Loss (nats) of whole hidden (..., D) under a head split by rows, the same on all ranks.

    Args:
        head_weight: DTensor (V, D), split by torch.chunk along V over its one mesh axis.
        options: chunk_tokens, reduction, label_smoothing, z_loss of chunked_next_token_loss.
    """
    assert isinstance(head_weight, DTensor)
    mesh, vocab_size = head_weight.device_mesh, head_weight.shape[0]
    operations = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
    cross_entropy = partial(
        cross_entropy_in_place,
        start=mesh.get_local_rank() * -(-vocab_size // mesh.size()),
        vocab_size=vocab_size,
        all_reduce=lambda part, how: dist.all_reduce(part, operations[how], mesh.get_group()),
    )
    return chunked_next_token_loss(
        hidden, head_weight.to_local(), targets, cross_entropy=cross_entropy, **options
    )


def pad_to_multiple(tokens: Tensor, n: int) -> Tensor:
    """Indices (..., T) padded with index 0 to (..., T')."""
    return F.pad(tokens, (0, -tokens.shape[-1] % n))


class _AlongSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group, gathers):
        ctx.group, ctx.gathers = group, gathers
        return (_all_gather if gathers else _reduce_scatter)(tensor, group)

    @staticmethod
    def backward(ctx, grad):  # ty: ignore[incompatible-method-override]  # of one output
        return (_reduce_scatter if ctx.gathers else _all_gather)(grad, ctx.group), None, None


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    all_gather_single(whole, part.contiguous(), group=group)
    whole = whole.unflatten(0, (group.size(), -1))  # (n, ..., t, D) -> (..., T', D)
    return whole.movedim(0, -3).flatten(-3, -2)


def _reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = whole.unflatten(-2, (group.size(), -1)).movedim(-3, 0).flatten(0, 1).contiguous()
    part = parts.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
    reduce_scatter_single(part, parts, group=group)
    return part  # (..., t, D)

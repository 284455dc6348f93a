"""Tensor parallelism: a matrix's columns or rows, and the sequence between, split over ranks.

A layer's first matrices are split by outputs, its last by inputs, so that a rank computes whole
heads and its part of the MLP alone; partial sums are reduce-scattered into slices of the sequence,
on which norms, dropout and the residual stream live, and gathered again after each norm. Dropout
then only ever sees what this rank alone holds: ranks draw from generators seeded differently.
Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.

Parameters become DTensors (for the optimizer, FSDP and checkpoints); layers compute on their local
parts with the collectives of `sequence`. DTensor's own sequence parallelism needs T to be a
multiple of the ranks, and pays its dispatcher at every operation.
"""

# V vocab, v this rank's part of it, D d_model, B batch, T time, T' padded, t = T' / ranks

from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gptrain.parallel.sequence import (
    gather_sequence,
    gather_vocabulary,
    pad_to_multiple,
    scatter_sequence,
)
from gptrain.parallel.slices import slice_of
from gptrain.parallel.unfit import Unfit


def apply_tensor_parallel(net: nn.Module, mesh: DeviceMesh) -> None:
    """Split the net in place over the mesh's "tensor" axis, as its tensor_plan says.

    forward still gives whole logits (B, T, V) on every rank. `hidden` gives whole hidden states
    whose gradient is summed over ranks: take the loss of `vocab_parallel_loss`, which knows.
    A weight tied to another stays tied.

    Raises: Unfit if the net lacks what is needed, or ranks would not hold whole heads.
    """
    check_tensor_parallel(net, mesh["tensor"].size())
    group = mesh["tensor"].get_group()
    roles = dict(_roles(net))
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(net.named_modules()):
        role = roles.get(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in sharded:
                sharded[parameter] = _shard(parameter, _PLACEMENTS.get((role, key)), mesh)
            setattr(module, key, sharded[parameter])
        if role is not None:
            module.__class__ = _mixed(_ROLES[role][0], type(module))
            module.tensor_group = group
    net.forward = partial(_without_padding, net.forward)
    if hasattr(net, "hidden"):
        net.hidden = partial(_without_padding, net.hidden)


def check_tensor_parallel(net: nn.Module, size: int) -> None:
    """Raises: Unfit if the net cannot be split over so many ranks; says what it lacks."""
    missing = [name for name in ("tensor_plan", "n_heads", "head") if not hasattr(net, name)]
    if missing:
        raise Unfit(
            "strategy.name",
            f"needs {', '.join(missing)} of {type(net).__name__} (see gptrain.models); "
            f"strategies that work without: single, ddp, and fsdp with `blocks`",
        )
    if net.n_heads % size:
        allowed = ", ".join(str(n) for n in range(1, net.n_heads + 1) if net.n_heads % n == 0)
        raise Unfit(
            "strategy.tensor_parallel_size",
            f"{size} ranks do not divide n_heads={net.n_heads}, each must hold whole heads; "
            f"allowed: {allowed}",
        )
    unknown = sorted(set(net.tensor_plan.values()) - set(_ROLES))
    if unknown:
        raise Unfit(
            "strategy.name",
            f"{type(net).__name__}.tensor_plan has roles {', '.join(unknown)}; "
            f"allowed: {', '.join(_ROLES)}",
        )
    for name, role in _roles(net):
        layer, known = net.get_submodule(name), _ROLES[role][1]
        if type(layer) not in known or (role == "vocab_head" and layer.bias is not None):
            raise Unfit(
                "strategy.name",
                f"tensor_plan makes {name} {role}: it is a {type(layer).__name__}, the role is for "
                f"{' and '.join(kind.__name__ for kind in known)}"
                f"{' without bias' if role == 'vocab_head' else ''}",
            )


def partial_parameters(net: nn.Module) -> list[nn.Parameter]:
    """Parameters whose gradients are sums over one rank's slice of the sequence only.

    Norms, the position table, and biases added to slices: to be summed over the tensor group once
    per optimizer step (`gradients.sum_gradients`).
    """
    found = []
    for name, role in _roles(net):
        module = net.get_submodule(name)
        if role in ("sequence", "position_embedding"):
            found += module.parameters(recurse=False)
        elif role == "rowwise" and module.bias is not None:
            found.append(module.bias)
    return found


def _roles(net: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in net.named_modules():
        for pattern, role in net.tensor_plan.items():
            if module is not None and fnmatch(name, pattern):
                yield name, role
                break


def _shard(parameter: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    mesh = mesh["tensor"]
    placements = [Replicate() if dim is None else Shard(dim)]
    local = slice_of(parameter.detach(), placements, mesh.get_coordinate(), mesh.shape)
    if local.shape != parameter.shape:
        local = local.clone()  # a view would keep the whole alive
    shape, stride = parameter.shape, parameter.stride()
    shard = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _without_padding(method, tokens: Tensor) -> Tensor:
    y, n_tokens = method(tokens), tokens.shape[1]  # (B, T', ...)
    return y if y.shape[1] == n_tokens else y[:, :n_tokens].clone()  # FSDP warns of views


# Roles are classes mixed in front of a layer's own: were they functions put on the instances,
# torch.compile would compile each block anew.


class _Colwise:
    def forward(self, whole: Tensor) -> Tensor:
        return F.linear(whole, _local(self.weight), _local(self.bias))


class _Rowwise:
    def forward(self, part: Tensor) -> Tensor:
        y = scatter_sequence(F.linear(part, _local(self.weight)), self.tensor_group)
        return y if self.bias is None else y + _local(self.bias).to(y.dtype)


class _Sequence:
    def forward(self, part: Tensor) -> Tensor:
        weight = _local(self.weight)
        if isinstance(self, nn.LayerNorm):
            y = F.layer_norm(part, self.normalized_shape, weight, _local(self.bias), self.eps)
        else:
            y = F.rms_norm(part, self.normalized_shape, weight, self.eps)
        if torch.is_autocast_enabled(y.device.type):  # norms give fp32, the matrices after it cast
            y = y.to(torch.get_autocast_dtype(y.device.type))
        return gather_sequence(y, self.tensor_group)


class _PositionEmbedding:
    def forward(self, positions: Tensor) -> Tensor:
        size, rank = self.tensor_group.size(), self.tensor_group.rank()
        mine = pad_to_multiple(positions, size).chunk(size, dim=-1)[rank]
        return F.embedding(mine, _local(self.weight))


class _VocabEmbedding:
    def forward(self, tokens: Tensor) -> Tensor:
        size, rank = self.tensor_group.size(), self.tensor_group.rank()
        n_rows = -(-self.num_embeddings // size)  # torch.chunk's
        rows = pad_to_multiple(tokens, size) - rank * n_rows
        weight = _local(self.weight)  # (v, D)
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        partial_sum = F.embedding(rows.masked_fill(elsewhere, 0), weight)
        partial_sum = partial_sum.masked_fill(elsewhere[..., None], 0.0)
        return scatter_sequence(partial_sum, self.tensor_group)


class _VocabHead:
    def forward(self, whole: Tensor) -> Tensor:
        logits = F.linear(whole, _local(self.weight))  # (B, T', v)
        return gather_vocabulary(logits, self.out_features, self.tensor_group)


def _local(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.to_local()


@cache
def _mixed(role: type, layer: type) -> type:
    return type(layer.__name__, (role, layer), {})


_ROLES = {  # role -> (its class, the layers that it knows)
    "colwise": (_Colwise, (nn.Linear,)),
    "rowwise": (_Rowwise, (nn.Linear,)),
    "sequence": (_Sequence, (nn.LayerNorm, nn.RMSNorm)),
    "position_embedding": (_PositionEmbedding, (nn.Embedding,)),
    "vocab_embedding": (_VocabEmbedding, (nn.Embedding,)),
    "vocab_head": (_VocabHead, (nn.Linear,)),
}
_PLACEMENTS = {  # (role, parameter) -> dimension that is split; all others are whole on every rank
    ("colwise", "weight"): 0,
    ("colwise", "bias"): 0,
    ("rowwise", "weight"): 1,
    ("vocab_embedding", "weight"): 0,
    ("vocab_head", "weight"): 0,
}

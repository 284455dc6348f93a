"""Tensor and sequence parallelism: weights split by columns or rows, activations by positions.

The first matrices of attention and MLP are split by outputs and the last by inputs, so that a rank
computes its own heads and its own part of the MLP without communication. The partial sums are
reduce-scattered into shards of the sequence. Norms, dropout and the residual stream work on these
shards, which are all-gathered after each norm. Gradients take the reverse way. Each collective
sends (n-1)/n of the full tensor per rank, half as much as an all-reduce. Every rank applies dropout
to its own positions or heads, so the ranks use different seeds.
Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.

Parameters are DTensors, for the optimizer, FSDP and checkpoints. The layers compute on local shards
with the collectives of this file. DTensor's own SequenceParallel requires that T is a multiple of
the number of ranks, and its dispatcher runs at every operation. This file pads the sequence at its
end instead, which does not change the logits of a causal net.

The loss is computed from each rank's columns of the logits, in chunks of tokens, with the gradients
in the same pass. The ranks exchange three numbers per token.
"""

# B batch, T time, D d_model, V vocab, C tokens of a chunk, n ranks of the tensor axis,
# v rows of V on this rank, T' = T padded to a multiple of n, t = T' / n

from collections.abc import Callable
from functools import cache, partial
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gptrain.loss import chunked_next_token_loss, cross_entropy_in_place
from gptrain.models.attention import SequenceLayout
from gptrain.parallel.requirements import Net, planned_layers

# Functional collectives return a new tensor. torch 2.11 compiles an autograd function that fills a
# given tensor by a collective into code whose gradients are zero. torch 2.13 renamed the functions.
if hasattr(functional, "all_gather_single"):
    all_gather, reduce_scatter = functional.all_gather_single, functional.reduce_scatter_single
else:
    all_gather, reduce_scatter = functional.all_gather_tensor, functional.reduce_scatter_tensor


def apply_tensor_parallel(
    net: nn.Module, mesh: DeviceMesh, check_length: Callable[[int], None] = lambda _: None
) -> None:
    """Split the net in place over the "tensor" axis of a mesh, as `net.tensor_plan` says.

    Tied weights stay tied. `net(tokens)` still returns the full logits (B, T, V) on every rank.
    `net.hidden(tokens)` returns the full hidden states (B, T, D); its backward pass sums their
    gradient over the ranks, so that only `vocab_parallel_loss` may be computed from them.

    After the last backward pass of a step, the caller must sum the gradients of
    `partial_parameters` over the axis.

    Args:
        net: Net with `tensor_plan`. It is identical on all ranks, or on the meta device.
        mesh: Device mesh with an axis "tensor".
        check_length: Function that raises an error for a number of positions that the net must not
            get. It is called in each forward pass.

    Raises:
        KeyError: If `net.tensor_plan` has an unknown role.
    """
    group = mesh["tensor"].get_group()
    net = cast(Net, net)
    roles = {name: net.tensor_plan[p] for name, _, p in planned_layers(net, net.tensor_plan)}
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(net.named_modules()):
        role_class, split_dims = _ROLES[roles[name]] if name in roles else (None, {})
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in sharded:
                sharded[parameter] = _shard(parameter, split_dims.get(key), mesh)
            setattr(module, key, sharded[parameter])
        if role_class is not None:
            module.__class__ = _mixed_class(role_class, type(module))
            module.tensor_group = group
    net.forward = partial(_without_padding, net.forward, group.size(), check_length)
    if hasattr(net, "hidden"):
        net.hidden = partial(_without_padding, net.hidden, group.size(), check_length)


def partial_parameters(net: nn.Module) -> list[nn.Parameter]:
    """Return the replicated parameters whose gradients cover only this rank's positions or heads.

    These are the parameters of norms, the position table, and biases that are added to a shard of
    the sequence. Their gradients must be summed over the tensor axis once per optimizer step.
    """
    parameters: list[nn.Parameter] = []
    net = cast(Net, net)
    for _, module, pattern in planned_layers(net, net.tensor_plan):
        role = net.tensor_plan[pattern]
        if role in ("sequence", "per_head", "position_embedding"):
            parameters += module.parameters(recurse=False)
        elif role == "rowwise" and module.bias is not None:
            parameters.append(module.bias)
    return parameters


def _shard(parameter: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter as a DTensor on the tensor axis, which requires gradients as before.

    Args:
        parameter: Full parameter, identical on all ranks.
        dim: Dimension that is split. None replicates the parameter.
        mesh: Device mesh with an axis "tensor".
    """
    placements = [Replicate() if dim is None else Shard(dim)]
    # src_data_rank=None sends nothing: the full parameter is identical on all ranks.
    shard = distribute_tensor(parameter.detach(), mesh["tensor"], placements, src_data_rank=None)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _without_padding(
    method, n_ranks: int, check_length, tokens: Tensor, *arguments, **options
) -> Tensor:
    """Call a method of the net and cut its result to the length of the tokens.

    Args:
        method: Method that pads its tokens and returns a tensor (B, T', ...) with T' >= T.
        n_ranks: Number of ranks of the tensor axis, of which T' is a multiple.
        check_length: Function that raises an error if the net must not be run on T positions.
        tokens: Token ids, (B, T).
        arguments: Further arguments of the method.
        options: Keyword arguments of the method. A `layout` is padded as the tokens are.
    """
    check_length(tokens.shape[1])
    if layout := options.get("layout"):
        options["layout"] = _pad_layout(layout, n_ranks)
    result = method(tokens, *arguments, **options)  # (B, T', ...)
    n_tokens = tokens.shape[1]
    if result.shape[1] == n_tokens:
        return result
    return result[:, :n_tokens].clone()  # FSDP warns about views


def _pad_layout(layout: SequenceLayout, n_ranks: int) -> SequenceLayout:
    """Pad a sequence layout at its end to a multiple of `n_ranks` positions.

    Without documents, the padding gets position 0. With documents it gets document 0, and all
    positions are computed again from the documents. Returns the layout unchanged if the ranks
    divide its positions.

    Args:
        layout: Positions (..., T) of the tokens, and their documents or None.
        n_ranks: Number of ranks of the tensor axis.
    """
    if layout.positions.shape[-1] % n_ranks == 0:
        return layout
    if layout.documents is None:
        return SequenceLayout(pad_to_multiple(layout.positions, n_ranks))
    return SequenceLayout.of_documents(pad_to_multiple(layout.documents, n_ranks))


# Each role is a class that is mixed in front of the class of the layer. If each instance got a
# `forward` function of its own instead, torch.compile would compile every block again.


class _Role(nn.Module):
    """Base class of the roles of layers under tensor parallelism.

    A role replaces `forward` of a layer, see `_mixed_class`. This class only declares attributes
    for the type checker.

    Attributes:
        weight: Weight of the layer as a DTensor.
        bias: Bias of the layer as a DTensor, or None.
        num_embeddings: Number of rows of an nn.Embedding.
        out_features: Number of outputs of an nn.Linear.
        tensor_group: Ranks of the tensor axis.
        layer_forward: Method `forward` of the layer's own class.
    """

    weight: DTensor
    bias: DTensor | None
    num_embeddings: int
    out_features: int
    tensor_group: dist.ProcessGroup
    layer_forward: Callable[..., Tensor]


class _Colwise(_Role):
    """Linear layer that is split by outputs.

    The input (..., in) is full; the result is this rank's outputs (..., out / n).
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to_local()
        return F.linear(x, self.weight.to_local(), bias)


class _Rowwise(_Role):
    """Linear layer that is split by inputs, with a reduce-scatter of the ranks' partial sums.

    The input is this rank's columns (B, T', in / n). The result is this rank's t = T' / n
    positions, (B, t, out). T' is the length of the padded sequence, n the number of ranks.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = scatter_sequence(F.linear(x, self.weight.to_local()), self.tensor_group)
        return y if self.bias is None else y + self.bias.to_local().to(y.dtype)


class _PerHead(_Role):
    """Norm of q or k that normalizes this rank's heads (..., d_head), without a collective.

    Every rank holds the full weight, as a replicated DTensor. This class calls the `forward` of the
    norm's own class with plain tensors in the place of DTensors (see `_LocalParameters`).
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_forward(_LocalParameters(self), x)


class _LocalParameters:
    """View of a layer without children, in which DTensors appear as their local shards.

    `_PerHead` passes it as `self` to the `forward` of the layer's own class, which cannot compute
    with DTensors and plain tensors together.

    Args:
        layer: Layer whose attributes the view shows.
    """

    def __init__(self, layer: nn.Module):
        self.layer = layer

    def __getattr__(self, name: str):
        value = getattr(self.layer, name)
        return value.to_local() if isinstance(value, DTensor) else value


class _Sequence(_PerHead):
    """Norm that runs on this rank's positions and returns the normalized full sequence.

    The result of (B, t, D) is all-gathered to (B, T', D). T' is the length of the padded sequence,
    and t is T' divided by the number of ranks.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        # Under autocast norms return fp32, and the next matrix multiplication casts it. Casting
        # before the all-gather sends half of the bytes.
        if torch.is_autocast_enabled(y.device.type):
            y = y.to(torch.get_autocast_dtype(y.device.type))
        return gather_sequence(y, self.tensor_group)


class _PositionEmbedding(_Role):
    """Table of positions that looks up only this rank's positions, (..., T) -> (..., t, D).

    All ranks hold the full table. T positions are padded to a multiple of the number of ranks, and
    t of them belong to each rank.
    """

    def forward(self, positions: Tensor) -> Tensor:
        n_ranks = self.tensor_group.size()
        shards = pad_to_multiple(positions, n_ranks).chunk(n_ranks, dim=-1)
        return F.embedding(shards[self.tensor_group.rank()], self.weight.to_local())


class _VocabEmbedding(_Role):
    """Token embedding whose rows are split over the ranks.

    Each rank looks up the tokens (B, T) that are in its rows. A reduce-scatter sums the results and
    gives each rank its t positions of the padded sequence, (B, t, D).
    """

    def forward(self, tokens: Tensor) -> Tensor:
        n_ranks = self.tensor_group.size()
        n_rows = -(-self.num_embeddings // n_ranks)  # torch.chunk rounds up
        rows = pad_to_multiple(tokens, n_ranks) - self.tensor_group.rank() * n_rows
        weight = self.weight.to_local()  # (v, D)
        is_on_other_rank = (rows < 0) | (rows >= weight.shape[0])
        partial_sum = F.embedding(rows.masked_fill(is_on_other_rank, 0), weight)
        partial_sum = partial_sum.masked_fill(is_on_other_rank[..., None], 0.0)
        return scatter_sequence(partial_sum, self.tensor_group)


class _VocabHead(_Colwise):
    """Head whose outputs are split over the ranks, with the full logits (B, T', V) on every rank.

    Each rank computes the logits of its own tokens of the vocabulary; an all-gather joins them.
    """

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)  # (B, T', v)
        full = logits.new_empty(*x.shape[:-1], self.out_features, device="meta")
        mesh = self.weight.device_mesh
        # Every rank computes the same function of the full logits, so the backward pass of
        # full_tensor takes this rank's columns of the gradient, without a sum over ranks.
        columns = DTensor.from_local(
            logits, mesh, [Shard(-1)], shape=full.shape, stride=full.stride()
        )
        return columns.full_tensor()  # (B, T', V)


@cache
def _mixed_class(role: type, layer: type[nn.Module]) -> type:
    """Return a class that inherits from a role and then from a layer's class.

    The new class has the name of the layer's class, and `layer_forward` is that class's `forward`.

    Args:
        role: Subclass of `_Role`, whose `forward` replaces the layer's.
        layer: Class of the layer, for example nn.Linear.
    """
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
    """All-gather the shards of a sequence into the full sequence, with gradients.

    All ranks of the group must call this function. Its backward pass is a reduce-scatter: the
    gradient of a shard is the sum over ranks of the gradients of this rank's positions.

    Args:
        shard: Positions of this rank, (..., t, D).
        group: Ranks that hold the shards, in the order of the positions.

    Returns:
        Full sequence (..., T', D), with T' = t times the number of ranks.
    """
    return _AlongSequence.apply(shard, group, True)


def scatter_sequence(partial_sum: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum tensors over the ranks and return this rank's positions of the sum, with gradients.

    This is a reduce-scatter. The backward pass is an all-gather. All ranks of the group must call
    this function.

    Args:
        partial_sum: Term of this rank, (..., T', D). The number of ranks divides T'.
        group: Ranks over which is summed. The rank in the group selects the positions.

    Returns:
        Positions of this rank in the sum, (..., t, D), with t = T' divided by the number of ranks.
    """
    return _AlongSequence.apply(partial_sum, group, False)


def vocab_parallel_loss(hidden: Tensor, head_weight: Tensor, targets: Tensor, **options) -> Tensor:
    """Return the loss in nats of hidden states under a head that is split by rows.

    All ranks of the head's mesh must call this function; the result is identical on all of them.
    The gradient of `hidden` covers only this rank's columns of the logits: it must be summed over
    the ranks, as the backward pass of `gather_sequence` does.

    Args:
        hidden: Full hidden states (..., D), identical on all ranks.
        head_weight: DTensor (V, D), sharded along V over a mesh with one axis.
        targets: Next tokens (...), int64. The loss ignores -100.
        options: Arguments chunk_tokens (tokens per chunk of logits), reduction ("sum" or "mean"),
            label_smoothing and z_loss of `loss.chunked_next_token_loss`.
    """
    assert isinstance(head_weight, DTensor)
    mesh, vocab_size = head_weight.device_mesh, head_weight.shape[0]
    operations = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
    cross_entropy = partial(
        cross_entropy_in_place,
        start=mesh.get_local_rank() * -(-vocab_size // mesh.size()),
        vocab_size=vocab_size,
        all_reduce=lambda tensor, name: dist.all_reduce(tensor, operations[name], mesh.get_group()),
    )
    return chunked_next_token_loss(
        hidden, head_weight.to_local(), targets, cross_entropy=cross_entropy, **options
    )


def pad_to_multiple(tokens: Tensor, n: int) -> Tensor:
    """Pad indices (..., T) with index 0 to (..., T'): T rounded up to a multiple of n."""
    return F.pad(tokens, (0, -tokens.shape[-1] % n))


class _AlongSequence(torch.autograd.Function):
    """All-gather or reduce-scatter along the sequence. Each is the backward pass of the other."""

    @staticmethod
    def forward(ctx, tensor, group, gathers):
        ctx.group = group
        ctx.gathers = gathers
        return _all_gather(tensor, group) if gathers else _reduce_scatter(tensor, group)

    @staticmethod
    def backward(ctx, grad):  # ty: ignore[incompatible-method-override]  # there is one output
        grad = _reduce_scatter(grad, ctx.group) if ctx.gathers else _all_gather(grad, ctx.group)
        return grad, None, None


def _all_gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the full sequence (..., T', D) of the ranks' shards (..., t, D), without gradients.

    All ranks of the group must call this function.
    """
    full = functional.wait_tensor(all_gather(shard.contiguous(), 0, group))
    full = full.unflatten(0, (group.size(), -1))  # (n, ..., t, D)
    return full.movedim(0, -3).flatten(-3, -2)  # (..., T', D)


def _reduce_scatter(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's positions (..., t, D) of the sum of (..., T', D), without gradients.

    All ranks of the group must call this function.
    """
    shards = full.unflatten(-2, (group.size(), -1)).movedim(-3, 0)  # (n, ..., t, D)
    shards = shards.flatten(0, 1).contiguous()
    return functional.wait_tensor(reduce_scatter(shards, "sum", 0, group))  # (..., t, D)

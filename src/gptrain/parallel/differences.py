"""Find the first module in which a partitioned net differs from the plain net.

`gptrain.parallel.comparison` runs both nets and calls the functions of this file.
"""

# B batch, T time, N = B * T, V vocab

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gptrain.parallel.mesh import gather
from gptrain.parallel.placement import local_shard, shard_like

INPUT = "input"
OUTPUT = "output"
Event = tuple[str, str]  # (name of a module, INPUT or OUTPUT)
# (position of a difference, description). The difference with the lowest position comes first.
Difference = tuple[int, str]


@dataclass
class ForwardRecord:
    """Inputs and outputs of the modules in a forward pass.

    Attributes:
        events: (module, INPUT or OUTPUT) -> tensors of each call, in the order of the first calls.
        pending: Names of the modules whose forward has begun and has not yet returned.
    """

    events: dict[Event, list[list[Tensor]]] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)


@dataclass
class PlainResult:
    """Results of the forward and the backward pass of the plain (unpartitioned) net.

    Attributes:
        logits: Logits (N, V).
        record: Inputs and outputs of all modules.
        gradients: Name of a parameter -> gradient. A tied parameter has its first name.
        first_names: Further name of a tied parameter -> its first name.
        classes: Name of a module -> class of the module.
        tolerance: Largest difference that counts as rounding, as a fraction of the largest value.
    """

    logits: Tensor
    record: ForwardRecord
    gradients: dict[str, Tensor]
    first_names: dict[str, str]
    classes: dict[str, type[nn.Module]]
    tolerance: float


@contextmanager
def recording(net: nn.Module, record: ForwardRecord) -> Generator[None, None, None]:
    """Record inputs and outputs of all modules of a net inside the block.

    Args:
        net: Net whose modules get forward hooks until the block ends. The net itself is not
            recorded, because not every strategy calls it.
        record: Record to which inputs and outputs are added.
    """

    def add(name: str, kind: str, values: Any) -> None:
        tensors = [leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        record.events.setdefault((name, kind), []).append(tensors)

    def add_input(name: str, args: Any, kwargs: Any) -> None:
        record.pending.append(name)
        add(name, INPUT, (args, kwargs))

    def add_output(name: str, output: Any) -> None:
        record.pending.remove(name)
        add(name, OUTPUT, output)

    hooks = []
    for name, part in net.named_modules():
        if name:
            before = part.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: add_input(name, args, kwargs), with_kwargs=True
            )
            after = part.register_forward_hook(
                lambda _, args, output, name=name: add_output(name, output)
            )
            hooks += [before, after]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compare_forward(
    plain: PlainResult,
    record: ForwardRecord,
    chunks: list[Tensor],
    group: dist.ProcessGroup | None,
) -> Difference | None:
    """Find the first module of this rank that causes different logits.

    Modules are compared only if the logits differ on some rank: a module may compute something else
    as long as the logits agree. Each rank of a pipeline compares its own modules, and only the last
    rank compares logits. All ranks must call this function.

    Args:
        plain: Results of the plain net.
        record: Inputs and outputs of the partitioned net's modules.
        chunks: Logits of the partitioned net, in order. Empty on a rank without the head.
        group: Ranks that each hold a shard of a module's output. None if every rank holds all of
            it.

    Returns:
        Position of the difference, where a lower one is earlier in the plain net's forward pass,
        and its description. If the logits of this rank differ but no module does, the description
        names the net's own `forward`. None if this rank finds no difference.
    """
    differs = False
    if chunks:
        logits = torch.cat(chunks)
        differs = relative_difference(logits, plain.logits) > plain.tolerance
    if not any(gather(differs)):
        return None
    rank, n_ranks = (0, 1) if group is None else (group.rank(), group.size())
    for position, ((name, kind), plain_calls) in enumerate(plain.record.events.items()):
        calls = record.events.get((name, kind))
        if calls and not is_same_call(calls, plain_calls, rank, n_ranks, plain.tolerance):
            return position, describe_difference(name, kind, plain.classes)
    net_class = plain.classes[""].__name__
    if not differs:
        return None
    return len(plain.record.events), f"all modules agree, and {net_class}.forward does not"


def describe_difference(name: str, kind: str, classes: Mapping[str, type[nn.Module]]) -> str:
    """Return a line that names the module whose code makes the first difference.

    A wrong output is the fault of the module. A wrong input was computed by the forward method of
    the module that contains it.

    Args:
        name: Name of the module whose input or output differs.
        kind: INPUT or OUTPUT.
        classes: Name of a module -> class of the module.
    """
    if kind == OUTPUT:
        return f"{name} ({classes[name].__name__}) is the first module that differs"
    owner = name.rpartition(".")[0]
    while owner and classes[owner].forward is nn.Module.forward:  # ModuleList has no forward
        owner = owner.rpartition(".")[0]
    first = f"{owner} ({classes[owner].__name__})" if owner else f"{classes[''].__name__}.forward"
    return f"{first} is the first module that differs, in the input that it passes to {name}"


def is_same_call(
    calls: list[list[Tensor]],
    plain_calls: list[list[Tensor]],
    rank: int,
    n_ranks: int,
    tolerance: float,
) -> bool:
    """Return whether all calls of a module agree with the calls of the plain net.

    A tensor in the partitioned net may be the full one, also with padding, or this rank's shard of
    it in some dimensions, as torch.chunk divides them. It is compared with the same part of the
    plain net's tensor. A tensor of any other shape is ignored. The calls do not agree if there are
    fewer than in the plain net, or if one has another number of tensors.

    A pipeline calls a module once for each microbatch. With n plain calls, the calls i, i + n, i +
    2n, ... belong to the plain call i: their tensors are concatenated along the batch.

    Args:
        calls: Tensors of each call in the partitioned net.
        plain_calls: Tensors of each call in the plain net.
        rank: Rank in the group that shares the activations: the number of this rank's shard.
        n_ranks: Size of that group: the number of shards.
        tolerance: Largest difference, as a fraction of the largest value of the plain tensor.
    """
    n_calls = len(plain_calls)
    for number, plain_tensors in enumerate(plain_calls):
        microbatches = calls[number::n_calls]
        if {len(tensors) for tensors in microbatches} != {len(plain_tensors)}:
            return False
        for values, full in zip(zip(*microbatches, strict=True), plain_tensors, strict=True):
            value = values[0]
            if len(values) > 1 and value.ndim == full.ndim > 0 and len(value) != len(full):
                # A pipeline may run one additional pass at first, to infer shapes. The last rows
                # are those of the microbatches.
                value = torch.cat(values)[-full.shape[0] :]
            pair = matching_shards(local_shard(value), full, rank, n_ranks)
            if pair is not None and relative_difference(*pair) > tolerance:
                return False
    return True


def matching_shards(
    value: Tensor, full: Tensor, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor] | None:
    """Return a rank's value without padding, and the shard of the full tensor that it should equal.

    Args:
        value: Tensor of this rank: the full tensor, or a shard of it in some dimensions.
        full: Tensor of the plain net.
        rank: Rank in the group that shares the activations.
        n_ranks: Size of that group.

    Returns:
        Two tensors of the same shape, or None if `value` has not the shape of a shard.
    """
    if value.ndim != full.ndim:
        return None
    for dim, (size, full_size) in enumerate(zip(value.shape, full.shape, strict=True)):
        # Shards are those of torch.chunk. A sequence is padded to n_ranks equal shards.
        shard_size = -(-full_size // n_ranks)
        start = min(rank * shard_size, full_size)
        count = min(shard_size, full_size - start)
        if size == full_size:
            continue
        if size == shard_size * n_ranks:  # the full dimension with padding at its end
            value = value.narrow(dim, 0, full_size)
        elif size in (shard_size, count):
            value = value.narrow(dim, 0, count)
            full = full.narrow(dim, start, count)
        else:
            return None
    return value, full


def compare_gradients(plain: PlainResult, net: nn.Module) -> Difference | None:
    """Find the last parameter of this rank whose gradient differs.

    Errors propagate backwards from the logits to the embedding, so the last parameter is the cause.
    There is no communication.

    Args:
        plain: Results of the plain net, with at least one gradient.
        net: Partitioned net after its backward pass.

    Returns:
        Position of the difference, where a lower one belongs to a later parameter of the plain net,
        and its description. None if this rank finds none.
    """
    largest = max(gradient.abs().max().item() for gradient in plain.gradients.values())
    positions = {name: -index for index, name in enumerate(plain.gradients)}
    differences = []
    for name, gradient, expected in gradient_pairs(plain, net):
        scale = expected.abs().max().item() if expected.numel() else 0.0
        # Gradients that are zero except for rounding are compared with the largest gradient.
        bound = plain.tolerance * max(scale, 1e-2 * largest)
        if gradient.numel() and not (gradient - expected).abs().max().item() <= bound:
            description = f"the logits agree, but not the gradient of {name}"
            differences.append((positions[name], description))
    return min(differences, default=None)


def gradient_pairs(plain: PlainResult, net: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, gradient and expected gradient of each parameter, as shards of this rank.

    The name is that in the plain net; a tied parameter has its first name. A missing gradient
    yields zeros. Parameters that have no gradient in the plain net are left out.

    Args:
        plain: Results of the plain net, with full gradients, from which the shards are cut.
        net: Partitioned net after its backward pass.
    """
    for name, parameter in net.named_parameters():
        first = plain.first_names.get(name, name)
        plain_gradient = plain.gradients.get(first)
        if plain_gradient is None:
            continue
        expected = local_shard(shard_like(plain_gradient.to(parameter.device), parameter))
        if parameter.grad is None:
            gradient = torch.zeros_like(expected)
        else:
            gradient = local_shard(parameter.grad)
        yield first, gradient.to(expected.device), expected


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors as a fraction of the largest value of `b`.

    Returns:
        The fraction; 0 for empty tensors, and infinity if the shapes differ or a NaN occurs.
    """
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.cpu().to(wide), b.cpu().to(wide)  # MPS has no float64
    if torch.equal(a, b):
        return 0.0  # before the subtraction: the infinities of two equal masks would give NaN
    largest = b.abs().nan_to_num(0.0, 0.0).max().clamp(min=1e-30)
    fraction = ((a - b).abs().max() / largest).item()
    return math.inf if math.isnan(fraction) else fraction

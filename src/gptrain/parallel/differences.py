"""Where a partitioned net differs first from the plain net, see `comparison`."""

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

from gptrain.parallel.placement import local_shard, shard_like

INPUT, OUTPUT = "input", "output"
Event = tuple[str, str]  # name of a module, and INPUT or OUTPUT
Found = tuple[int, str]  # place of a difference, the lowest is the first; and its description


@dataclass
class Record:
    """What a forward pass gave to its modules and got from them.

    Attributes:
        events: Module and direction -> the tensors of each call, in the order of the first calls.
        pending: Names of the modules whose forward has begun and has not returned.
    """

    events: dict[Event, list[list[Tensor]]] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)


@dataclass
class Plain:
    """What the plain net computed.

    Attributes:
        logits: (N, V).
        gradients: Name of a parameter -> its gradient; a tied parameter has its first name.
        second_names: Second name of a tied parameter -> its first name.
        classes: Name of a module -> its class.
        tolerance: Largest difference that is taken for rounding, as a fraction.
    """

    logits: Tensor
    record: Record
    gradients: dict[str, Tensor]
    second_names: dict[str, str]
    classes: dict[str, type[nn.Module]]
    tolerance: float


@contextmanager
def recording(net: nn.Module, record: Record) -> Generator[None, None, None]:
    """Record inside the block what the modules of a net are given and what they return."""

    def note(name: str, kind: str, values: Any) -> None:
        tensors = [leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        record.events.setdefault((name, kind), []).append(tensors)

    def note_input(name: str, given: Any, named: Any) -> None:
        record.pending.append(name)
        note(name, INPUT, (given, named))

    def note_output(name: str, made: Any) -> None:
        record.pending.remove(name)
        note(name, OUTPUT, made)

    hooks = []
    for name, part in net.named_modules():
        if name:  # the net itself is not called by every strategy
            before = part.register_forward_pre_hook(
                lambda _, given, named, name=name: note_input(name, given, named), with_kwargs=True
            )
            after = part.register_forward_hook(
                lambda _, given, made, name=name: note_output(name, made)
            )
            hooks += [before, after]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compare_forward(
    plain: Plain,
    record: Record,
    chunks: list[Tensor],
    group: dist.ProcessGroup | None,
) -> Found | None:
    """Return the first difference that this rank sees between logits, and the module it is in.

    Modules are looked at only where the logits differ: a module in between may well compute
    something else if it makes no difference in the end. Each rank of a pipeline sees its own
    modules, and only the last one sees logits. All ranks must call it.

    Args:
        chunks: Logits of the partitioned net, in order; none on a rank that has no head.
        group: Ranks of which each holds a slice of a module's output.

    Returns:
        None if this rank sees no difference.
    """
    differs, tolerance = False, plain.tolerance
    if chunks:
        logits = torch.cat(chunks)
        differs = logits.shape != plain.logits.shape or difference(logits, plain.logits) > tolerance
    if not any(gather(differs)):
        return None
    share = (0, 1) if group is None else (group.rank(), group.size())
    for place, ((name, kind), calls) in enumerate(plain.record.events.items()):
        theirs = record.events.get((name, kind))
        if theirs and not is_same_call(theirs, calls, share, tolerance):
            return place, describe(name, kind, plain.classes)
    net_class = plain.classes[""].__name__
    if not differs:
        return None
    return len(plain.record.events), f"all modules agree, and {net_class}.forward does not"


def describe(name: str, kind: str, classes: Mapping[str, type[nn.Module]]) -> str:
    """Return the line that names the module whose code makes the first difference.

    What a module is given is computed by the forward of the module around it.
    """
    if kind == OUTPUT:
        return f"{name} ({classes[name].__name__}) is the first module that differs"
    owner = name.rpartition(".")[0]
    while owner and classes[owner].forward is nn.Module.forward:  # ModuleList has no forward
        owner = owner.rpartition(".")[0]
    first = f"{owner} ({classes[owner].__name__})" if owner else f"{classes[''].__name__}.forward"
    return f"{first} is the first module that differs, in what it gives {name}"


def is_same_call(
    calls: list[list[Tensor]], plain: list[list[Tensor]], share: tuple[int, int], tolerance: float
) -> bool:
    """Return whether all calls of a module agree with those of the plain net.

    Microbatches of a pipeline are calls of their own, which are put together. Tensors whose shapes
    have nothing to do with each other are taken to agree: only what is comparable is compared.
    """
    n_calls = len(plain)
    for number, expected in enumerate(plain):
        parts = calls[number::n_calls]
        if any(len(part) != len(expected) for part in parts):
            return False
        for tensors, whole in zip(zip(*parts, strict=True), expected, strict=True):
            value = tensors[0]
            if len(tensors) > 1 and value.ndim == whole.ndim > 0 and len(value) != len(whole):
                # A pipeline may learn its shapes by one more pass, before all others.
                value = torch.cat(tensors)[-whole.shape[0] :]
            part = matching_part(local_shard(value), whole, share)
            if part is not None and difference(*part) > tolerance:
                return False
    return True


def matching_part(
    value: Tensor, whole: Tensor, share: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """Return a rank's value and that part of the plain net's tensor which it should equal.

    Args:
        share: Number of this rank among those that share a sequence or a layer, and their number.

    Returns:
        None if the value is no part of that tensor.
    """
    rank, n_ranks = share
    if value.ndim != whole.ndim:
        return None
    for dim, (mine, full) in enumerate(zip(value.shape, whole.shape, strict=True)):
        size = -(-full // n_ranks)  # of torch.chunk; the sequence is padded to equal chunks
        start = min(rank * size, full)
        count = min(size, full - start)
        if mine == full:
            continue
        if mine == size * n_ranks:  # padded at its end
            value = value.narrow(dim, 0, full)
        elif mine in (size, count):
            value, whole = value.narrow(dim, 0, count), whole.narrow(dim, start, count)
        else:
            return None
    return value, whole


def compare_gradients(plain: Plain, net: nn.Module) -> Found | None:
    """Return the parameter whose gradient differs, or None.

    Errors travel from the logits towards the embedding, so the last parameter is the cause.
    """
    largest = max(gradient.abs().max().item() for gradient in plain.gradients.values())
    places = {name: -place for place, name in enumerate(plain.gradients)}
    message = []
    for name, mine, expected in gradient_pairs(plain, net):
        own = expected.abs().max().item() if expected.numel() else 0.0
        # A gradient that is zero but for rounding is compared with the largest of all.
        bound = plain.tolerance * max(own, 1e-2 * largest)
        if mine.numel() and not (mine - expected).abs().max().item() <= bound:
            message.append((places[name], f"the logits agree, but not the gradient of {name}"))
    return min(message, default=None)


def gradient_pairs(plain: Plain, net: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each parameter's name, this rank's gradient, and the same part of the plain net's."""
    for name, parameter in net.named_parameters():
        first = plain.second_names.get(name, name)
        if (gradient := plain.gradients.get(first)) is None:
            continue
        expected = local_shard(shard_like(gradient.to(parameter.device), parameter))
        mine = torch.zeros_like(expected) if parameter.grad is None else local_shard(parameter.grad)
        yield first, mine.to(expected.device), expected


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference as a fraction of the largest value; infinity for a NaN."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.cpu().to(wide), b.cpu().to(wide)  # MPS has no float64
    if torch.equal(a, b):
        return 0.0  # masks are infinite
    largest = b.abs().nan_to_num(0.0, 0.0).max().clamp(min=1e-30)
    fraction = ((a - b).abs().max() / largest).item()
    return math.inf if math.isnan(fraction) else fraction


def gather(value: Any) -> list[Any]:
    """Return each rank's value, on all ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

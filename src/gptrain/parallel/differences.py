"""Compare the logits and the gradients of a partitioned net with those of the plain net.

`gptrain.parallel.comparison` runs both nets and calls the functions of this file.
"""

# N positions, V vocab

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptrain.parallel.placement import local_shard, shard_like

# (position of a difference, description). The difference with the lowest position comes first.
Difference = tuple[int, str]


@dataclass
class PlainResult:
    """Results of the forward and the backward pass of the plain (unpartitioned) net.

    Attributes:
        logits: Logits (N, V).
        gradients: Name of a parameter -> gradient. A tied parameter has its first name.
        first_names: Further name of a tied parameter -> its first name.
        tolerance: Largest difference that counts as rounding, as a fraction of the largest value.
    """

    logits: Tensor
    gradients: dict[str, Tensor]
    first_names: dict[str, str]
    tolerance: float


def compare_logits(plain: PlainResult, chunks: list[Tensor]) -> Difference | None:
    """Find out whether the logits of this rank differ from those of the plain net.

    Args:
        plain: Results of the plain net.
        chunks: Logits of the partitioned net, in order. Empty on a rank without the head.
    """
    if not chunks or relative_difference(torch.cat(chunks), plain.logits) <= plain.tolerance:
        return None
    return 0, "its logits differ"


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

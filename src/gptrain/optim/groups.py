"""Which parameters decay, which Muon takes, and how the learning rate follows the batch."""

import math
from collections.abc import Iterable

from torch import nn

Named = Iterable[tuple[str, nn.Parameter]]


def decay_groups(learned: nn.Module | Named, weight_decay: float) -> list[dict]:
    """Groups for any torch optimizer: matrices decay, vectors and scalars do not.

    Biases and the norms' scales are left alone because pulling them to zero regularises nothing.
    A tied parameter is in one group once, a frozen one in none, and no group is empty.

    Args:
        learned: a module, or names and parameters, where some lie beside the net.
    """
    named = learned.named_parameters() if isinstance(learned, nn.Module) else learned
    parameters = list(dict.fromkeys(p for _, p in named if p.requires_grad))
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_groups(net: nn.Module, weight_decay: float, learned: Named | None = None) -> list[dict]:
    """Groups for Muon: the matrices of net.blocks flagged use_muon, the rest as in decay_groups.

    Embeddings, head and vectors go to AdamW: an update of equal singular values is meant for a
    matrix between hidden states (kellerjordan.github.io/posts/muon).

    Args:
        learned: names and parameters of all that is trained; None: the net's.

    Raises: ValueError if the net has no attribute blocks.
    """
    if not hasattr(net, "blocks"):
        raise ValueError(
            f"Muon: {type(net).__name__} has no attribute `blocks`, so that its hidden matrices "
            f"are not known; give it one (see gptrain.models) or take AdamW"
        )
    matrices = {p for p in net.blocks.parameters() if p.ndim == 2}
    learned = list(net.named_parameters() if learned is None else learned)
    hidden = decay_groups([(name, p) for name, p in learned if p in matrices], weight_decay)
    rest = decay_groups([(name, p) for name, p in learned if p not in matrices], weight_decay)
    groups = [{**group, "use_muon": True} for group in hidden]
    return groups + [{**group, "use_muon": False} for group in rest]


def scaled_lr(lr: float, rule: str, global_batch_size: int, reference_batch_size: int) -> float:
    """The learning rate for global_batch_size, given one that suits reference_batch_size.

    Args:
        rule: "none"; "linear" in the batch size, for SGD (arXiv:1706.02677); or "sqrt", for Adam
            and its kin (arXiv:2205.10287).

    Raises: ValueError if the rule is not known.
    """
    ratio = global_batch_size / reference_batch_size
    factors = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    if rule not in factors:
        raise ValueError(f"lr_scaling={rule!r}: not known; allowed: {', '.join(factors)}")
    return lr * factors[rule]

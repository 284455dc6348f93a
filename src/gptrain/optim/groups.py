"""Which parameters decay, which Muon takes, and how the learning rate follows the batch."""

from collections.abc import Iterable, Mapping

from torch import nn


def decay_groups(parameters: Iterable[nn.Parameter]) -> list[dict]:
    """Groups for any torch optimizer: matrices take its own weight_decay, vectors and scalars none.

    Biases and the norms' scales are left alone because pulling them to zero regularises nothing.
    A frozen parameter is in no group, and no group is empty.
    """
    learned = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p.ndim >= 2]},
        {"params": [p for p in learned if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_groups(
    net: nn.Module,
    parameters: Iterable[nn.Parameter] | None = None,
    names: Mapping[nn.Parameter, str] | None = None,
    **lrs: float | None,
) -> list[dict]:
    """Groups for Muon: the matrices of net.blocks flagged use_muon, the rest as in decay_groups.

    Embeddings, head and vectors go to AdamW: an update of equal singular values is meant for a
    matrix between hidden states (kellerjordan.github.io/posts/muon).

    Args:
        parameters: all that is trained; None: the net's.
        names: of the net's; one of `head.` alone is the head's, so that a tied one is an embedding.
        lrs: learning rates of `embedding`, `head` and `vector`; None: the optimizer's.

    Raises: ValueError if the net has no attribute blocks.
    """
    if not hasattr(net, "blocks"):
        raise ValueError(
            f"Muon: {type(net).__name__} has no attribute `blocks`, so that its hidden matrices "
            f"are not known; give it one (see gptrain.models) or take AdamW"
        )
    names = names or {p: name for name, p in net.named_parameters()}
    hidden = {p for p in net.get_submodule("blocks").parameters() if p.ndim == 2}
    kinds: dict[str, list[nn.Parameter]] = {
        kind: [] for kind in ("hidden", "embedding", "head", "vector", "beside")
    }
    for p in net.parameters() if parameters is None else parameters:
        if (name := names.get(p)) is None:
            kind = "beside"
        elif p in hidden:
            kind = "hidden"
        elif p.ndim < 2:
            kind = "vector"
        else:
            kind = "head" if name.startswith("head.") else "embedding"
        kinds[kind].append(p)
    groups = []
    for kind, members in kinds.items():
        options = {"use_muon": kind == "hidden"}
        if (lr := lrs.get(kind)) is not None:
            options["lr"] = lr
        groups += [group | options for group in decay_groups(members)]
    return groups


def scaled_lr(lr: float, rule: str, global_batch_size: int, reference_batch_size: int) -> float:
    """The learning rate for global_batch_size, given one that suits reference_batch_size.

    Args:
        rule: "none"; "linear" in the batch size, for SGD (arXiv:1706.02677); or "sqrt", for Adam
            and its kin (arXiv:2205.10287).
    """
    ratio = global_batch_size / reference_batch_size
    return lr * ratio ** {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[rule]

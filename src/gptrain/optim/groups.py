"""Makes parameter groups for weight decay and for Muon, and scales learning rates."""

from collections.abc import Iterable, Mapping

from torch import nn


def decay_groups(parameters: Iterable[nn.Parameter]) -> list[dict]:
    """Return the parameter groups for a torch optimizer with weight decay on matrices only.

    Parameters with at least two dimensions get the weight decay of the optimizer. Vectors and
    scalars, such as biases and the scales of norms, get none, because pulling them towards zero
    does not regularize. Parameters without `requires_grad` are in no group. An empty group is left
    out, so that there may be no group at all.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_groups(
    net: nn.Module,
    parameters: Iterable[nn.Parameter] | None = None,
    names: Mapping[nn.Parameter, str] | None = None,
    *,
    embedding_lr: float | None = None,
    head_lr: float | None = None,
    vector_lr: float | None = None,
) -> list[dict]:
    """Return the parameter groups for Muon, with `use_muon=True` for the matrices of `net.blocks`.

    Muon updates all others by AdamW: an update whose singular values are equal suits only a matrix
    that maps hidden states to hidden states (kellerjordan.github.io/posts/muon). Vectors have no
    weight decay, and parameters without `requires_grad` are in no group.

    Args:
        net: Net whose attribute `blocks` has the hidden matrices.
        parameters: Parameters to train, also those outside `net`. None stands for those of `net`.
        names: Name of each parameter of `net` in the unpartitioned net. None stands for the names
            in `net`. A name that begins with `head.` marks the head, so that a tied head that has
            the name of the embedding counts as embedding. A parameter without a name counts as
            outside `net`.
        embedding_lr: Learning rate of all tensors of `net` that are neither hidden matrices nor
            head nor vectors. None stands for the `lr` of the optimizer, which hidden matrices and
            parameters outside `net` always have.
        head_lr: Learning rate of the head. None stands for `lr`.
        vector_lr: Learning rate of vectors and scalars of `net`. None stands for `lr`.

    Raises:
        ValueError: If the net has no attribute `blocks`.
    """
    if not hasattr(net, "blocks"):
        raise ValueError(
            f"Muon: {type(net).__name__} has no attribute `blocks`, which contains the hidden "
            f"matrices; add it (see gptrain.models) or use AdamW"
        )
    names = names or {p: name for name, p in net.named_parameters()}
    hidden = {p for p in net.get_submodule("blocks").parameters() if p.ndim == 2}

    def kind_of(p: nn.Parameter) -> str:
        if p not in names:
            return "outside_net"
        if p in hidden:
            return "hidden"
        if p.ndim < 2:
            return "vector"
        return "head" if names[p].startswith("head.") else "embedding"

    parameters = [*(net.parameters() if parameters is None else parameters)]
    lrs = {"hidden": None, "embedding": embedding_lr, "head": head_lr, "vector": vector_lr}
    groups = []
    for kind, lr in {**lrs, "outside_net": None}.items():
        options = {"use_muon": kind == "hidden"} | ({} if lr is None else {"lr": lr})
        members = [p for p in parameters if kind_of(p) == kind]
        groups += [group | options for group in decay_groups(members)]
    return groups


def scaled_lr(lr: float, rule: str, global_batch_size: int, reference_batch_size: int) -> float:
    """Return a learning rate scaled from a reference batch size to the batch size of the run.

    Args:
        lr: Learning rate that suits `reference_batch_size`.
        rule: "linear" multiplies by the ratio of the batch sizes, for SGD (Goyal et al. 2017,
            arXiv:1706.02677). "sqrt" multiplies by its square root, for Adam and similar optimizers
            (Malladi et al. 2022, arXiv:2205.10287). "none" changes nothing.
        global_batch_size: Sequences per optimizer step of the run.
        reference_batch_size: Sequences per optimizer step for which `lr` was chosen.

    Raises:
        KeyError: If `rule` is none of the three.
    """
    ratio = global_batch_size / reference_batch_size
    return lr * ratio ** {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[rule]

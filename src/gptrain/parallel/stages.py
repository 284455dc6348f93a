"""A net cut into stages that keep its names."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptrain.parallel.unfit import Unfit


def stages_per_rank(schedule: str) -> int:
    """Stages that one rank holds: two under interleaving, which halves the idle time, else one."""
    return 2 if schedule == "interleaved_1f1b" else 1


def block_range(stage: int, n_stages: int, n_blocks: int) -> range:
    """Blocks of a stage, in order; where they do not divide, early stages hold one more.

    The last has the head to compute besides, which costs more than the embedding.
    """
    start, stop = (-(-n_blocks * i // n_stages) for i in (stage, stage + 1))
    return range(start, stop)


def cut_stages(net: nn.Module, stages: Iterable[int], n_stages: int) -> tuple[str, str] | None:
    """Drop in place all of net that these stages do not hold; what stays keeps its name.

    The first stage keeps what `embed` uses, all but blocks, norm and head; the last keeps these
    two. Works on the meta device, before anything is allocated.

    Returns: the two names of a weight that first and last stage share, in the net's order, or None.
    Raises: Unfit if weights are shared in another way.
    """
    tied = find_tied_names(net)
    stages, n_blocks = list(stages), len(net.blocks)
    blocks = {str(i): block for i, block in enumerate(net.blocks)}
    held = [str(i) for stage in stages for i in block_range(stage, n_stages, n_blocks)]
    net.blocks = nn.ModuleDict({name: blocks[name] for name in held})
    ends = {"norm", "head"}
    own = [name for name, _ in net.named_children() if name != "blocks"]
    own += [name for name, _ in net.named_parameters(recurse=False)]
    for name in own:
        if (n_stages - 1 if name in ends else 0) not in stages:
            setattr(net, name, None)
    return tied


class Stage(nn.Module):
    """One stage of a cut net: tokens or activations in, activations or final hidden states out."""

    def __init__(self, net: nn.Module, blocks: range, is_first: bool, is_last: bool):
        super().__init__()
        self.net, self.is_first, self.is_last = net, is_first, is_last
        self.held = [str(i) for i in blocks]

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.net.embed(x)  # (B, T) -> (B, T, D)
        for name in self.held:
            x = self.net.blocks[name](x)
        return self.net.norm(x) if self.is_last else x


def merge_stages(state: dict[str, Tensor], stages: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """All stages' tensors on the first of them, sent one at a time; {} on the others."""
    if stages is None or stages.size() == 1:
        return state
    first = dist.get_global_rank(stages, 0)
    device = "cpu" if dist.get_backend(stages) == "gloo" else torch.cuda.current_device()
    headers: list = [None] * stages.size()
    mine = [(name, tensor.shape, tensor.dtype) for name, tensor in state.items()]
    dist.all_gather_object(headers, mine, group=stages)
    if stages.rank() != 0:
        for tensor in state.values():
            dist.send(tensor.to(device).contiguous(), first, group=stages)
        return {}
    for sender in range(1, stages.size()):
        for name, shape, dtype in headers[sender]:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, dist.get_global_rank(stages, sender), group=stages)
            state.setdefault(name, tensor.cpu())
    return state


def find_tied_names(net: nn.Module) -> tuple[str, str] | None:
    """Both names of the weight that embedding and head share.

    Raises: Unfit if the net shares anything else.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    tied = [shared for shared in names.values() if len(shared) > 1]
    if not tied:
        return None
    places = [sorted(name.partition(".")[0] for name in shared) for shared in tied]
    if len(tied) > 1 or len(tied[0]) != 2 or "head" not in places[0] or "blocks" in places[0]:
        raise Unfit(
            "strategy.name",
            f"a pipeline can share one weight, between embedding and head; this net shares "
            f"{'; '.join(' = '.join(shared) for shared in tied)}",
        )
    return tied[0][0], tied[0][1]

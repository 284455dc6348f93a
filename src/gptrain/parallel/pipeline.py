"""Pipeline parallelism: each rank holds a few blocks and passes activations on.

A batch is divided into microbatches that follow each other through the stages. Stages idle for
(p-1)/(m+p-1) of a step, p stages and m microbatches; interleaving two stages a rank halves that.
Source: Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473.
"""

# B batch, b microbatch, T time, D d_model

from collections.abc import Callable, Iterable
from functools import partial
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from gptrain.parallel.fit import Unfit, check_attributes, tied_names
from gptrain.parallel.gradients import sum_gradients

_SCHEDULES = {  # name -> class, stages per rank
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved_1f1b": (ScheduleInterleaved1F1B, 2),
}
_OnMicrobatch = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """This rank's stages of a net, which it partitions in place, and the schedule that runs them.

    What this rank holds keeps its name. `net(tokens)` and `net.hidden(tokens)` raise Unfit, since
    no rank holds the whole net. A weight that the head shares with the embedding is held by both
    ends, which sum its gradients: updates of equal weights by equal gradients keep them equal.

    Args:
        mesh: of `build_mesh`; its "data" axis averages gradients over replicas of the pipeline.
        schedule: "gpipe", "1f1b" or "interleaved_1f1b".
        loss_sum: hidden (b, T, D) after the final norm, targets (b, T) -> summed loss of training.
            Called on the last stage only.
        eval_loss_sum: the same in `evaluate`; None: loss_sum.

    Attributes:
        has_last: whether this rank holds the last stage.
        group: of this pipeline's ranks.
        aliases: second name of a weight that both ends hold -> its first, as in a checkpoint.

    Raises: Unfit if the net lacks what is needed, or has too few blocks.
    """

    def __init__(
        self,
        net: nn.Module,
        mesh: DeviceMesh,
        *,
        schedule: str,
        microbatches: int,
        loss_sum: _OnMicrobatch,
        eval_loss_sum: _OnMicrobatch | None = None,
    ):
        axis = mesh["pipeline"]
        self.group = axis.get_group()
        self.rank, self.size = axis.get_local_rank(), axis.size()
        self.data_group = mesh["data"].get_group()
        check_pipeline(net, self.size, schedule, microbatches)
        self.net, self.schedule, self.microbatches = net, schedule, microbatches
        self.loss_sum, self.eval_loss_sum = loss_sum, eval_loss_sum or loss_sum
        self.n_stages = self.size * _SCHEDULES[schedule][1]
        self.indices = range(self.rank, self.n_stages, self.size)
        self.has_first, self.has_last = 0 in self.indices, self.n_stages - 1 in self.indices
        self.n_blocks = len(net.blocks)
        tied = partition_stages(net, self.indices, self.n_stages)
        self.aliases = tied if self.size > 1 else {}
        self.tied_group = _end_groups(mesh) if self.aliases else None
        _forbid_forward(net, "ddp_pipeline" if self.data_group.size() > 1 else "pipeline")
        self._schedules: dict[tuple, object] = {}  # (training, shape) -> one with its buffers
        self._scale: Tensor | float = 1.0
        self._on_hidden: Callable[[Tensor, Tensor], object] | None = None

    def tied_parameters(self) -> list[nn.Parameter]:
        """Those that the other end holds as well: one on the first and the last rank, else none."""
        tied = {*self.aliases, *self.aliases.values()}
        return [parameter for name, parameter in self.net.named_parameters() if name in tied]

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, n_counted: Tensor, scale: float = 1.0
    ) -> Tensor:
        """Mean loss of tokens, targets (B, T), the same on every rank; adds to the gradients.

        Args:
            n_counted: targets that count: the mean is over all microbatches' tokens at once.
            scale: on the gradients alone (1 / micro-steps of an optimizer step).

        Raises: ValueError if the microbatches do not divide the batch.
        """
        if len(tokens) % self.microbatches:
            raise ValueError(
                f"microbatches={self.microbatches} does not divide the {len(tokens)} sequences of "
                f"a batch; allowed: {_divisors(len(tokens))}"
            )
        self._scale = scale / n_counted
        return self._run(True, self.microbatches, tokens, targets) / scale

    @torch.no_grad()
    def evaluate(
        self,
        tokens: Tensor,
        targets: Tensor,
        on_hidden: Callable[[Tensor, Tensor], object] | None = None,
    ) -> Tensor:
        """Summed loss of tokens, targets (B, T), the same on every rank of the pipeline.

        Args:
            on_hidden: called on the last stage with each microbatch's hidden states (b, T, D),
                after the final norm, and targets (b, T).
        """
        n = gcd(len(tokens), self.microbatches)
        if len(self.indices) > 1 and n % self.size:
            n = 1  # interleaving goes round by round
        self._on_hidden = on_hidden
        try:
            return self._run(False, n, tokens, targets)
        finally:
            self._on_hidden = None

    def finish_gradients(self) -> None:
        """Sum tied gradients between the ends, and average all over replicas of the pipeline.

        Once per optimizer step, after its last micro-step.
        """
        if self.tied_parameters():
            sum_gradients(self.tied_parameters(), self.tied_group)
        sum_gradients(self.net.parameters(), self.data_group, divisor=self.data_group.size())

    def _run(self, training: bool, microbatches: int, tokens: Tensor, targets: Tensor) -> Tensor:
        key = (training, microbatches, tuple(tokens.shape))
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(training, microbatches, tokens.device)
        schedule = self._schedules[key]
        losses: list[Tensor] = []
        inputs = (tokens.contiguous(),) if self.has_first else ()  # torch 2.11 compares strides
        outputs = {"target": targets, "losses": losses} if self.has_last else {}
        (schedule.step if training else schedule.eval)(*inputs, **outputs)
        total = torch.zeros((), device=tokens.device)
        if self.has_last:
            total = torch.stack([loss.detach() for loss in losses]).sum().float()
        last = dist.get_global_rank(self.group, (self.n_stages - 1) % self.size)
        dist.broadcast(total, last, group=self.group)
        return total

    def _make_schedule(self, training: bool, microbatches: int, device: torch.device):
        # Buffers and shapes are fixed by the first batch that a schedule sees: one for each shape.
        n, group = self.n_stages, self.group
        stages = [
            PipelineStage(Stage(self.net, i, n, self.n_blocks), i, n, device, group=group)
            for i in self.indices
        ]
        kind, _ = _SCHEDULES[self.schedule]
        if not training and len(stages) == 1:
            kind = ScheduleGPipe  # takes any number of microbatches, forward only it is the same
        return kind(
            stages if len(stages) > 1 else stages[0],
            microbatches,
            loss_fn=self._training_loss if training else self._evaluation_loss,
            scale_grads=False,
        )

    def _training_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.loss_sum(hidden, targets) * self._scale

    def _evaluation_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self._on_hidden is not None:
            self._on_hidden(hidden, targets)
        return self.eval_loss_sum(hidden, targets)


class Stage(nn.Module):
    """One stage of a partitioned net: tokens or activations -> activations or hidden states."""

    def __init__(self, net: nn.Module, index: int, n_stages: int, n_blocks: int):
        super().__init__()
        self.net, self.is_first, self.is_last = net, index == 0, index == n_stages - 1
        self.held = [str(i) for i in block_range(index, n_stages, n_blocks)]

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.net.embed(x)  # (B, T) -> (B, T, D)
        for name in self.held:
            x = self.net.blocks[name](x)
        return self.net.norm(x) if self.is_last else x


def count_microbatches(options, dims) -> int:
    """Microbatches of the `strategy` group: as given, or two per rank of a pipeline."""
    return options.microbatches or 2 * dims.pipeline


def block_range(stage: int, n_stages: int, n_blocks: int) -> range:
    """Blocks of a stage, in order; where they do not divide, early stages hold one more.

    The last also computes the head, which costs more than the embedding.
    """
    start, stop = (-(-n_blocks * i // n_stages) for i in (stage, stage + 1))
    return range(start, stop)


def partition_stages(net: nn.Module, stages: Iterable[int], n_stages: int) -> dict[str, str]:
    """Remove in place all of net that these stages do not hold; the rest keeps its names.

    The first stage keeps what `embed` uses: all but blocks, norm and head; the last keeps these
    two. Works on the meta device, before anything is allocated.

    Returns: as find_tied_names.
    """
    tied = find_tied_names(net)
    stages, n_blocks = list(stages), len(net.blocks)
    blocks = {str(i): block for i, block in enumerate(net.blocks)}
    held = [str(i) for stage in stages for i in block_range(stage, n_stages, n_blocks)]
    net.blocks = nn.ModuleDict({name: blocks[name] for name in held})
    own = [name for name, _ in net.named_children() if name != "blocks"]
    own += [name for name, _ in net.named_parameters(recurse=False)]
    for name in own:
        if (n_stages - 1 if name in ("norm", "head") else 0) not in stages:
            setattr(net, name, None)
    return tied


def find_tied_names(net: nn.Module) -> dict[str, str]:
    """Second name -> first name of the weight that embedding and head share; {} if there is none.

    Raises: Unfit if the net shares anything else.
    """
    tied = tied_names(net)
    for second, first in tied.items():
        places = {name.partition(".")[0] for name in (first, second)}
        if len(tied) > 1 or "head" not in places or "blocks" in places:
            shared = "; ".join(f"{first} = {second}" for second, first in tied.items())
            raise Unfit(
                "strategy.name",
                f"a pipeline can share one weight, between embedding and head; this net shares "
                f"{shared}",
            )
    return tied


def check_pipeline(net: nn.Module, size: int, schedule: str, microbatches: int) -> None:
    """Raises: Unfit if the net cannot be divided into so many stages; says what it lacks."""
    check_attributes(net, ("embed", "blocks", "norm", "head"))
    find_tied_names(net)
    if schedule not in _SCHEDULES:
        raise Unfit("strategy.schedule", f"not known; allowed: {', '.join(_SCHEDULES)}")
    n_blocks, n_stages = len(net.blocks), size * _SCHEDULES[schedule][1]
    if n_stages > n_blocks:
        raise Unfit(
            "strategy.pipeline_parallel_size",
            f"{size} ranks under {schedule} make {n_stages} stages, but the net has {n_blocks} "
            f"blocks: a stage must hold at least one",
        )
    too_few = f"{microbatches} for {size} stages: 1f1b needs at least one per stage; use at least "
    uneven = f"{microbatches} is no multiple of {size} ranks, as interleaved_1f1b needs"
    if schedule == "1f1b" and microbatches < size:
        raise Unfit("strategy.microbatches", f"{too_few}{size}, or schedule=gpipe")
    if schedule == "interleaved_1f1b" and microbatches % size:
        raise Unfit("strategy.microbatches", uneven)


def _forbid_forward(net: nn.Module, strategy: str) -> None:
    net.register_forward_pre_hook(partial(_refuse, strategy))
    if hasattr(net, "hidden"):
        net.hidden = partial(_refuse, strategy)


def _refuse(strategy: str, *_) -> None:
    raise Unfit(
        "strategy.name",
        f"under {strategy} no rank holds the whole net, so self.net(tokens) cannot run; "
        f"use self.loss(tokens, targets)",
    )


def _end_groups(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    # The first and last rank of every pipeline; each rank must take part in making all of them.
    mine = None
    for ranks in mesh.mesh[[0, -1], :, 0].T.tolist():
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)

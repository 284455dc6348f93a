"""Pipeline parallelism: each rank holds a few blocks and passes activations on.

A batch is cut into microbatches that follow each other through the stages. Stages idle for
(p-1)/(m+p-1) of a step, p stages and m microbatches; interleaving two stages a rank halves that.
Source: Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473.
"""

# B batch, T time, D d_model

from collections.abc import Callable
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

from gptrain.parallel.gradients import sum_gradients
from gptrain.parallel.stages import (
    Stage,
    block_range,
    cut_stages,
    find_tied_names,
    stages_per_rank,
)
from gptrain.parallel.unfit import Unfit

_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}


class Pipeline:
    """This rank's stages of a net, which it cuts in place, and the schedule that runs them.

    `net` keeps its own names for what this rank holds; its `forward` is gone. A weight that the
    head shares with the embedding is held by both ends, which sum its gradients: updates of equal
    weights by equal gradients keep them equal.

    Args:
        mesh: of `build_mesh`; its "data" axis averages gradients over replicas of the pipeline.
        schedule: "gpipe", "1f1b" or "interleaved_1f1b".
        loss_sum: hidden (b, T, D) after the final norm, targets (b, T) -> summed loss. Called on
            the last stage alone.

    Raises: Unfit if the net lacks what is needed, or has too few blocks.
    """

    def __init__(
        self,
        net: nn.Module,
        mesh: DeviceMesh,
        *,
        schedule: str,
        microbatches: int,
        loss_sum: Callable[[Tensor, Tensor], Tensor],
    ):
        axis = mesh["pipeline"]
        self.group = axis.get_group()
        self.rank, self.size = axis.get_local_rank(), axis.size()
        self.data_group = mesh["data"].get_group()
        check_pipeline(net, self.size, schedule, microbatches)
        self.net, self.schedule, self.microbatches = net, schedule, microbatches
        self.loss_sum = loss_sum
        self.n_stages = self.size * stages_per_rank(schedule)
        self.indices = range(self.rank, self.n_stages, self.size)
        self.n_blocks = len(net.blocks)
        tied_names = cut_stages(net, self.indices, self.n_stages)
        self.tied_names = tied_names if tied_names and self.size > 1 else ()
        self.tied_group = _end_groups(mesh) if self.tied_names else None
        self._running: dict[tuple, object] = {}  # (training, shape) -> schedule with its buffers
        self._scale: Tensor | float = 1.0

    def tied_parameters(self) -> list[nn.Parameter]:
        """Those that the other end holds as well: one on the first and the last rank, else none."""
        held = dict(self.net.named_parameters())
        return [held[name] for name in self.tied_names if name in held]

    @property
    def aliases(self) -> dict[str, str]:
        """Second name of a weight that both ends hold -> its first, the one in a checkpoint."""
        return dict([self.tied_names[::-1]]) if self.tied_names else {}

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, n_counted: Tensor, scale: float = 1.0
    ) -> Tensor:
        """Mean loss of tokens, targets (B, T), alike on every rank; adds to the gradients.

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
        total = self._run(True, self.microbatches, tokens, targets)
        return total / scale

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Summed loss of tokens, targets (B, T), alike on every rank of the pipeline."""
        self._scale = 1.0
        n = gcd(len(tokens), self.microbatches)
        if len(self.indices) > 1 and n % self.size:
            n = 1  # interleaving goes round by round
        return self._run(False, n, tokens, targets)

    def finish_gradients(self) -> None:
        """Sum tied gradients between the ends, and average all over replicas of the pipeline.

        Once per optimizer step, after its last micro-step.
        """
        if self.tied_parameters():
            sum_gradients(self.tied_parameters(), self.tied_group)
        sum_gradients(self.net.parameters(), self.data_group, divisor=self.data_group.size())

    def _run(self, training: bool, microbatches: int, tokens: Tensor, targets: Tensor) -> Tensor:
        key = (training, microbatches, tuple(tokens.shape))
        if key not in self._running:
            self._running[key] = self._make_schedule(training, microbatches, tokens.device)
        running = self._running[key]
        has_first, has_last = 0 in self.indices, self.n_stages - 1 in self.indices
        losses: list[Tensor] = []
        inputs = (tokens.contiguous(),) if has_first else ()  # torch 2.11 compares strides
        outputs = {"target": targets, "losses": losses} if has_last else {}
        run = running.step if training else running.eval
        run(*inputs, **outputs)
        total = torch.zeros((), device=tokens.device)
        if has_last:
            total = torch.stack([loss.detach() for loss in losses]).sum().float()
        last = dist.get_global_rank(self.group, (self.n_stages - 1) % self.size)
        dist.broadcast(total, last, group=self.group)
        return total

    def _stage(self, index: int) -> Stage:
        blocks = block_range(index, self.n_stages, self.n_blocks)
        return Stage(self.net, blocks, index == 0, index == self.n_stages - 1)

    def _make_schedule(self, training: bool, microbatches: int, device: torch.device):
        # Buffers and shapes are fixed by the first batch that a schedule sees: one for each shape.
        stages = [
            PipelineStage(self._stage(index), index, self.n_stages, device, group=self.group)
            for index in self.indices
        ]
        kind = _SCHEDULES[self.schedule]
        if not training and len(stages) == 1:
            kind = ScheduleGPipe  # takes any number of microbatches, forward only it is the same
        return kind(
            stages if len(stages) > 1 else stages[0],
            microbatches,
            loss_fn=lambda hidden, targets: self.loss_sum(hidden, targets) * self._scale,
            scale_grads=False,
        )


def count_microbatches(options, split) -> int:
    """Microbatches of the `strategy` group: as given, or two per rank of a pipeline."""
    return options.microbatches or 2 * split.pipeline


def check_pipeline(net: nn.Module, size: int, schedule: str, microbatches: int) -> None:
    """Raises: Unfit if the net cannot be cut into so many stages; says what it lacks."""
    missing = [name for name in ("embed", "blocks", "norm", "head") if not hasattr(net, name)]
    if missing:
        raise Unfit(
            "strategy.name",
            f"needs {', '.join(missing)} of {type(net).__name__} (see gptrain.models); "
            f"strategies that work without: single, ddp, and fsdp with `blocks`",
        )
    find_tied_names(net)
    if schedule not in _SCHEDULES:
        raise Unfit("strategy.schedule", f"not known; allowed: {', '.join(_SCHEDULES)}")
    n_blocks, n_stages = len(net.blocks), size * stages_per_rank(schedule)
    if n_stages > n_blocks:
        raise Unfit(
            "strategy.pipeline_parallel_size",
            f"{size} ranks under {schedule} make {n_stages} stages, but the net has {n_blocks} "
            f"blocks: a stage must hold at least one",
        )
    if schedule == "1f1b" and microbatches < size:
        raise Unfit(
            "strategy.microbatches",
            f"{microbatches} for {size} stages: 1f1b needs at least one per stage; use at least "
            f"{size}, or schedule=gpipe",
        )
    if schedule == "interleaved_1f1b" and microbatches % size:
        raise Unfit(
            "strategy.microbatches",
            f"{microbatches} is no multiple of {size} ranks, as interleaved_1f1b needs",
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

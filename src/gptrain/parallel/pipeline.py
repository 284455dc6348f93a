"""Pipeline parallelism: each rank holds a few blocks and passes activations on.

A batch is divided into microbatches that follow each other through the stages. Stages idle for
(p-1)/(m+p-1) of a step, p stages and m microbatches; interleaving two stages a rank halves that.
Source: Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473.
"""

# B batch, b microbatch, T time, D d_model

from collections.abc import Callable, Iterator
from functools import cached_property
from math import gcd
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from gptrain.core.strategies import (
    STAGES_PER_RANK,
    ParallelDims,
    PipelineOptions,
    count_microbatches,
    stage_blocks,
)
from gptrain.loss import LossOptions, logits_in_chunks
from gptrain.parallel.gradients import sum_gradients
from gptrain.parallel.mesh import build_mesh
from gptrain.parallel.requirements import IncompatibleModelError, Net, tied_names
from gptrain.parallel.state import Stages
from gptrain.parallel.strategy import ParallelStrategy

Loss = Callable[[Tensor, Tensor], Tensor]  # of hidden (b, T, D) after the norm, targets (b, T)


class Pipeline(ParallelStrategy[PipelineOptions]):
    """This rank's stages of a net, and the schedule that runs them.

    What this rank holds keeps its name. `net(tokens)` and `net.hidden(tokens)` raise
    IncompatibleModelError, since
    no rank holds the whole net. A weight that the head shares with the embedding is held by both
    ends, which sum its gradients: updates of equal weights by equal gradients keep them equal.

    Forward and backward passes of a micro-step are one run of the schedule, inside training_step.
    What the loss is then multiplied by could not reach the gradients any more, so that the first
    step makes sure that training_step returns it as it is, alone or in a sum.

    Attributes:
        last: rank in the pipeline's group that holds the last stage.
    """

    is_partitioned = is_pipeline = True

    def __post_init__(self):
        self.mesh = mesh = build_mesh(self.device.type, self.dims)
        axis, self.schedule = mesh["pipeline"], self.options.schedule
        self.group, self.data_group = axis.get_group(), mesh["data"].get_group()
        self.rank, self.last = axis.get_local_rank(), axis.size() - 1
        self.microbatches = count_microbatches(self.options.microbatches, axis.size())
        self.replicas = mesh["data"] if self.dims.data > 1 else None
        self.n_stages = axis.size() * STAGES_PER_RANK[self.schedule]
        self.indices = range(self.rank, self.n_stages, axis.size())
        if self.last:  # all ranks make the groups of all pipelines
            ends = mesh.mesh[[0, -1], :, 0].T.tolist()
            self.ends_group, _ = dist.new_subgroups_by_enumeration(ends)
        self._loss: Loss  # of the pass that is run
        self._checks_scale = True

    def split(self, net: Net) -> None:
        """Leaves in net what this rank's stages hold."""
        self.net, self.n_blocks = net, len(net.blocks)
        self._schedules: dict[tuple, Any] = {}  # (training, shape) -> one with its buffers
        self.stages = Stages(self.group, tied_names(net) if self.last else {})
        keep_stages(net, self.indices, self.n_stages)
        net.forward = net.hidden = _refuse

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Of what several stages hold the first counts in the norm."""
        super().prepare(module, optimizer)
        if self.rank:
            self.counted_on_other_stage = {*self.tied_parameters, *self.extra_parameters}

    @cached_property
    def tied_parameters(self) -> list[nn.Parameter]:
        """Those that the other end holds as well: one on the first and the last rank, else none."""
        tied = {*self.stages.aliases, *self.stages.aliases.values()}
        return [parameter for name, parameter in self.net.named_parameters() if name in tied]

    def mean_loss(self, net: Net, tokens: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        """Of this pipeline's samples, on all its ranks; in training, gradients besides."""
        if not torch.is_grad_enabled():
            return super().mean_loss(net, tokens, targets, options)
        scale = 1 / self.accumulate
        factor = scale / self.loss_divisor(targets)

        def loss(hidden: Tensor, targets: Tensor) -> Tensor:
            total = self.head_loss(net, hidden, targets, options)
            return total * factor.to(total.dtype)

        total = self._run(True, self.microbatches, tokens, targets, loss)
        anchor = torch.ones((), requires_grad=True, device=total.device)
        return _GradientsExist.apply(anchor, total / scale, scale if self._checks_scale else None)

    def loss_sum(self, net: Net, tokens: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        """Of this pipeline's samples, on all its ranks; without gradients."""
        return self.evaluate(tokens, targets, lambda *given: self.head_loss(net, *given, options))

    def logits(self, net: Net, tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """On the ranks of the last stage alone; on the others nothing."""
        found: list[tuple[Tensor, Tensor]] = []

        def keep(hidden: Tensor, targets: Tensor) -> Tensor:
            found.append((hidden, targets))
            return hidden.new_zeros(())

        self.evaluate(tokens, targets, keep)
        for hidden, chunk_targets in found:
            yield from logits_in_chunks(hidden, net.head, chunk_targets)

    def broadcast_metric(self, compute: Callable[[], Any]) -> Any:
        """Return what is computed on the last stage: tensors of any shape, in dicts or lists."""
        value = [tree_map_only(Tensor, Tensor.cpu, compute()) if self.rank == self.last else None]
        dist.broadcast_object_list(value, group=self.group, group_src=self.last)
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.device), value[0])

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor, loss: Loss) -> Tensor:
        """`_run` without gradients, of a batch that may be smaller."""
        n = gcd(len(tokens), self.microbatches)
        if len(self.indices) > 1 and n % (self.last + 1):
            n = 1  # interleaving goes round by round
        return self._run(False, n, tokens, targets, loss)

    def finish_gradients(self) -> None:
        """Sums tied gradients between the ends, and averages all over replicas of the pipeline."""
        super().finish_gradients()
        self._checks_scale = False
        if self.tied_parameters:
            sum_gradients(self.tied_parameters, self.ends_group)
        self.average(self.net.parameters())

    def _run(
        self, training: bool, microbatches: int, tokens: Tensor, targets: Tensor, loss: Loss
    ) -> Tensor:
        """Sum of a loss over the microbatches of (B, T), on every rank."""
        # Buffers and shapes are fixed by the first batch that a schedule sees: one for each shape.
        key = (training, microbatches, tuple(tokens.shape))
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(training, microbatches, tokens.device)
        schedule, self._loss = self._schedules[key], loss
        losses: list[Tensor] = []
        inputs = (tokens.contiguous(),) if self.rank == 0 else ()  # torch 2.11 compares strides
        outputs = {"target": targets, "losses": losses} if self.rank == self.last else {}
        (schedule.step if training else schedule.eval)(*inputs, **outputs)
        # Of one type on all ranks: within a step of bf16-true or 64-true torch's default is theirs.
        total = torch.zeros((), dtype=torch.float32, device=tokens.device)
        for one in losses:
            total += one.detach()
        dist.broadcast(total, group=self.group, group_src=self.last)
        return total

    def _make_schedule(self, training: bool, microbatches: int, device: torch.device):
        n, group = self.n_stages, self.group
        stages = [
            PipelineStage(Stage(self.net, i, n, self.n_blocks), i, n, device, group=group)
            for i in self.indices
        ]
        is_one = len(stages) == 1
        # Forward only gpipe is the same, and takes any number of microbatches.
        name = "gpipe" if is_one and not training else self.schedule.replace("_", "")
        return get_schedule_class(name)(  # in any case
            stages[0] if is_one else stages,
            microbatches,
            loss_fn=lambda hidden, targets: self._loss(hidden, targets),
            scale_grads=False,
        )


class _GradientsExist(torch.autograd.Function):
    """A loss whose gradients the schedule has formed; `scale` is what they were multiplied by."""

    @staticmethod
    def forward(ctx, anchor, total, scale):
        ctx.scale = scale
        return total.clone()

    @staticmethod
    def backward(ctx, grad):  # ty: ignore[incompatible-method-override]  # of one output
        if ctx.scale is not None and abs(float(grad) / ctx.scale - 1) > 1e-3:  # 16 bit losses
            raise IncompatibleModelError(
                "strategy.name",
                f"training_step multiplies self.loss(...) by {float(grad) / ctx.scale:g}, but a "
                "pipeline has formed its gradients already; return it as it is, or change "
                "optimizer.lr",
            )
        return None, None, None


class Stage(nn.Module):
    """One stage of a partitioned net: tokens or activations -> activations or hidden states."""

    def __init__(self, net: Net, index: int, n_stages: int, n_blocks: int):
        super().__init__()
        self.net, self.is_first, self.is_last = net, index == 0, index == n_stages - 1
        self.held = [str(i) for i in stage_blocks(index, n_stages, n_blocks)]

    def forward(self, x: Tensor) -> Tensor:
        # In training, torch 2.11 learns the shapes by a pass over zeros: it must not draw what the
        # dropout of the first batch is to draw.
        learns_shapes = self.net.training and not torch.is_grad_enabled()
        with torch.random.fork_rng([x.device] if x.is_cuda else [], enabled=learns_shapes):
            if self.is_first:
                x = self.net.embed(x)  # (B, T) -> (B, T, D)
            for name in self.held:
                x = self.net.get_submodule(f"blocks.{name}")(x)
            return self.net.norm(x) if self.is_last else x


def keep_stages(net: nn.Module, stages: range, n_stages: int) -> None:
    """Remove in place all of net that these stages do not hold; the rest keeps its names.

    It works on the meta device, so that what goes was never allocated. The first stage keeps what
    `embed` uses: all but blocks, norm and head; the last these two.
    """
    blocks = list(cast(Net, net).blocks)
    held = [i for stage in stages for i in stage_blocks(stage, n_stages, len(blocks))]
    net.blocks = nn.ModuleDict({str(i): blocks[i] for i in held})
    own = [name for name, _ in net.named_children() if name != "blocks"]
    own += [name for name, _ in net.named_parameters(recurse=False)]
    for name in own:
        if (n_stages - 1 if name in ("norm", "head") else 0) not in stages:
            setattr(net, name, None)


def check_pipeline(net: Net, options: PipelineOptions, dims: ParallelDims) -> None:
    """Raises: IncompatibleModelError if the net cannot be divided into so many stages; says
    what it lacks.
    """
    tied = tied_names(net)
    for second, first in tied.items():
        places = {name.partition(".")[0] for name in (first, second)}
        if len(tied) > 1 or "head" not in places or "blocks" in places:
            shared = "; ".join(f"{first} = {second}" for second, first in tied.items())
            allowed = "a pipeline can share one weight, between embedding and head"
            raise IncompatibleModelError("strategy.name", f"{allowed}; this net shares {shared}")
    n_blocks, n_stages = len(net.blocks), dims.pipeline * STAGES_PER_RANK[options.schedule]
    if n_stages > n_blocks:
        raise IncompatibleModelError(
            "strategy.pipeline_parallel_size",
            f"{dims.pipeline} ranks under {options.schedule} make {n_stages} stages, but the "
            f"net has {n_blocks} blocks: a stage must hold at least one",
        )


def _refuse(*_) -> NoReturn:
    raise IncompatibleModelError(
        "strategy.name",
        "no rank of a pipeline holds the whole net, so self.net(tokens) cannot run; "
        "use self.loss(tokens, targets)",
    )

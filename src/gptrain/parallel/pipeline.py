"""Pipeline parallelism: each rank holds some of the blocks and sends activations to the next rank.

A batch is divided into microbatches, which pass through the stages one after another. With p stages
and m microbatches, each stage is idle for (p-1)/(m+p-1) of a step. Source: Huang et al. 2019
(GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473.
"""

# B batch, b microbatch, T time, D d_model

from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from math import gcd
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils._pytree import tree_map_only

from gptrain.core.strategies import PIPELINE, count_microbatches, stage_blocks
from gptrain.loss import LossOptions, logits_in_chunks
from gptrain.models.attention import layout_argument
from gptrain.parallel.base import Batch, Parallel
from gptrain.parallel.gradients import clip_grad_norm, sum_gradients
from gptrain.parallel.requirements import IncompatibleModelError, Net, tied_names

_CHANGED = (
    "a term of the loss or a hook has changed gradients, of which a rank has those of its stages; "
    "return self.loss(...) alone, and clip by trainer.gradient_clip_val or self.clip_gradients"
)
# Function of hidden states (b, T, D) after the final norm and targets (b, T) -> scalar loss.
_Loss = Callable[[Tensor, Tensor], Tensor]


class Pipeline(Parallel):
    """Train this rank's stage of the net with a pipeline schedule of torch.

    All ranks must build the object, as any `Parallel`. If head and embedding share a weight, the
    first and the last rank both hold the weight and sum its gradients. The copies stay equal,
    because equal weights get equal updates.

    `loss_sum` runs the schedule, with the forward and backward passes of a micro-step. `backward`
    of the loss multiplies these gradients by the gradient that arrives there, and adds them to
    `grad`: the loss may be scaled, or be a sum of several.

    A hook, or a penalty on the net, would change the gradients of one stage only. So every step
    raises an IncompatibleModelError if other code has changed a gradient of the net.
    """

    is_pipeline = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stage_group = self._mesh.get_group(PIPELINE)
        self._rank = self._mesh.get_local_rank(PIPELINE)
        self._last = self.dims.pipeline - 1
        self.microbatches = count_microbatches(self.options.microbatches, self.dims.pipeline)
        if self._last:
            # new_subgroups_by_enumeration is collective: every rank creates the groups of all
            # pipelines, one pipeline for each rank of the data axis.
            ends = self._mesh.mesh[[0, -1], :, 0, 0].T.tolist()
            self._ends_group, _ = dist.new_subgroups_by_enumeration(ends)
        self._seen: dict[nn.Parameter, Any] = {}  # `_versions` after the last change by this object

    def _split(self, net: Net) -> None:
        """Keep only this rank's stage in the net, in place. The net can no longer be called."""
        self._schedule = cache(self._build_schedule)
        self._tied_names = {*tied_names(net).values()} if self._last else set()
        _keep_stage(net, self._rank, self._last)
        net.forward = net.hidden = _raise_no_full_net

    @cached_property
    def _tied_parameters(self) -> list[nn.Parameter]:
        """Parameters that both the first and the last rank hold; empty on all other ranks."""
        return [p for name, p in self._net.named_parameters() if name in self._tied_names]

    def logits_of_parts(self, net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the logits (B, T, V) of a full net, by the parts that the stages run in turn."""
        hidden = _Stage(net, is_first=True, is_last=True)(tokens)
        return F.linear(hidden, net.head.weight, net.head.bias)

    def loss_sum(self, net: Net, batch: Batch, options: LossOptions) -> Tensor:
        """Return the sum of the losses in nats of a batch, a scalar, on all ranks. Collective.

        With gradients enabled the schedule also runs the backward passes, and `backward` of the
        result adds their gradients to those of the net.
        """
        before = {parameter: parameter.grad for parameter in net.parameters()}
        net.zero_grad()
        total = self._run(batch, partial(self.head_loss, net, options=options))
        gradients = {p: p.grad for p in before if p.grad is not None}
        for parameter, gradient in before.items():
            parameter.grad = gradient
        if torch.is_grad_enabled():
            # The gradient of `total` is the factor of the gradients of the schedule.
            total.requires_grad_().register_hook(partial(self._add_gradients, gradients))
        return total

    @torch.no_grad()
    def _add_gradients(self, gradients: dict[nn.Parameter, Tensor], factor: Tensor) -> None:
        """Run `check_gradients`, scale gradients in place by `factor`, and add them to `grad`."""
        self.check_gradients()
        if gradients:  # a stage may have no trained parameter
            torch._foreach_mul_(list(gradients.values()), factor)
        for parameter, gradient in gradients.items():
            if parameter.grad is not None:
                gradient += parameter.grad
            parameter.grad = gradient
        self._seen = self._versions()

    @torch.no_grad()
    def logits(self, net: Net, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what `Parallel.logits` yields, on the last stage only. All ranks must iterate."""
        outputs: list[tuple[Tensor, Tensor]] = []

        def keep(hidden: Tensor, targets: Tensor) -> Tensor:
            outputs.append((hidden, targets))
            return hidden.new_zeros(())

        self._run(batch, keep)
        for hidden, microbatch_targets in outputs:
            yield from logits_in_chunks(hidden, net.head, microbatch_targets)

    def broadcast_metric(self, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute` of the last stage on all ranks of the pipeline.

        Collective. `compute` is a function without arguments, which only the last stage calls. Its
        tensors come to the device of each rank.
        """
        value = [tree_map_only(Tensor, Tensor.cpu, compute()) if self._rank == self._last else None]
        dist.broadcast_object_list(value, group=self.stage_group, group_src=self._last)
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.device), value[0])

    def finish_gradients(self) -> None:
        """Complete the gradients once per step, after the last backward pass. Collective.

        Adds up those of tied weights, and averages all over the data axis, in place.

        Raises:
            IncompatibleModelError: If other code has changed gradients of the net, or if the ranks
                of the data axis use different parameters.
        """
        self.check_gradients()
        super().finish_gradients()
        if self._tied_parameters:
            sum_gradients(self._tied_parameters, self._ends_group)
        self._average(self._net.parameters())
        self._seen = self._versions()

    def measure_and_clip(self, parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
        """Clip the gradients of all stages, as in `Parallel.measure_and_clip`. Collective."""
        shared = (*self._tied_parameters, *self._extra_parameters)
        counted_on_other_stage = {*shared} if self._rank else set()
        norm = clip_grad_norm(parameters, max_norm, self.stage_group, counted_on_other_stage)
        self._seen = self._versions()
        return norm

    def check_gradients(self) -> None:
        """Raise an IncompatibleModelError if other code has changed a gradient of the net.

        Changes are those since this object has last changed the gradients.
        """
        for parameter, version in self._versions().items():
            if version != self._seen.get(parameter):
                raise IncompatibleModelError("strategy.name", _CHANGED)

    def _versions(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Return the identity and the version counter of each gradient, by its parameter."""
        parameters = ((p, p.grad) for p in self._net.parameters())
        return {p: (id(grad), grad._version) for p, grad in parameters if grad is not None}

    def _run(self, batch: Batch, loss: _Loss) -> Tensor:
        """Run a schedule and return the sum of `loss` over the microbatches, on every rank.

        With gradients enabled it also runs the backward passes.
        """
        tokens, targets, documents = batch
        training = torch.is_grad_enabled()
        # An evaluation may have a batch that is not divisible by the number of microbatches.
        microbatches = self.microbatches if training else gcd(len(tokens), self.microbatches)
        schedule = self._schedule(training, microbatches, tokens.shape, tokens.device)
        self._loss = loss  # the schedule calls it
        losses: list[Tensor] = []
        inputs = (tokens.contiguous(),) if self._rank == 0 else ()  # torch 2.11 compares strides
        outputs = {"target": targets, "losses": losses} if self._rank == self._last else {}
        run = schedule.step if training else schedule.eval
        # The schedule divides the documents into microbatches and passes them to every stage.
        options = {} if documents is None else {"documents": documents}
        run(*inputs, **outputs, **options)
        # All ranks must broadcast one dtype. Under bf16-true and 64-true Lightning changes torch's
        # default dtype during a step, so the dtype is given.
        total = torch.zeros((), dtype=torch.float32, device=tokens.device)
        for loss_of_part in losses:
            total += loss_of_part.detach()
        dist.broadcast(total, group=self.stage_group, group_src=self._last)
        return total

    def _build_schedule(self, training: bool, microbatches: int, shape: Any, device: torch.device):
        """Return a schedule of torch for this stage. Its first batch fixes its shapes."""
        stage = _Stage(self._net, self._rank == 0, self._rank == self._last)
        # With forward passes only, all schedules are the same. GPipe accepts any number of
        # microbatches.
        name = self.options.schedule if training else "gpipe"
        return get_schedule_class(name)(  # get_schedule_class ignores case
            PipelineStage(stage, self._rank, self._last + 1, device, group=self.stage_group),
            microbatches,
            loss_fn=lambda hidden, targets: self._loss(hidden, targets),
            scale_grads=False,
        )


class _Stage(nn.Module):
    """Run one stage, without the head: tokens (b, T) or activations -> activations (b, T, D)."""

    def __init__(self, net: Net, is_first: bool, is_last: bool):
        super().__init__()
        self.net = net
        self.is_first = is_first
        self.is_last = is_last

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Run the blocks of this stage, and the embedding before or the final norm behind them."""
        options = layout_argument(documents)
        # In training, torch 2.11 infers shapes by a forward pass over zeros. That pass must not
        # advance the random generator that the dropout of the first batch uses.
        learns_shapes = self.net.training and not torch.is_grad_enabled()
        with torch.random.fork_rng([x.device] if x.is_cuda else [], enabled=learns_shapes):
            if self.is_first:
                x = self.net.embed(x, **options)  # (b, T) -> (b, T, D)
            # One block may stand in several places. The blocks of a full net are a list.
            blocks = self.net.blocks
            for block in blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks:
                x = block(x, **options)
            return self.net.norm(x) if self.is_last else x


def _keep_stage(net: Net, stage: int, last: int) -> None:
    """Remove from a net, in place, all layers that do not belong to a stage, and keep all names.

    The first and the last stage keep a weight that they share, under both of its names.
    """
    blocks = list(net.blocks)
    shared = {name: net.get_parameter(name) for name in tied_names(net).values()}
    kept = stage_blocks(stage, last + 1, len(blocks))
    net.blocks = nn.ModuleDict({str(i): blocks[i] for i in kept})
    names = [name for name, _ in net.named_children() if name != "blocks"]
    names += [name for name, _ in net.named_parameters(recurse=False)]
    for name in names:
        owner = last if name in ("norm", "head") else 0
        if stage != owner:
            setattr(net, name, None)
    for name, parameter in shared.items() if stage in (0, last) else ():
        *path, key = name.split(".")
        layer = net
        for part in path:  # layers of which this stage has the weight only
            if getattr(layer, part, None) is None:
                setattr(layer, part, nn.Module())
            layer = getattr(layer, part)
        layer.register_parameter(key, parameter)


def _raise_no_full_net(*_) -> NoReturn:
    """Raise an IncompatibleModelError, in place of the methods that need the full net."""
    message = "no rank of a pipeline can run self.net(tokens); use self.loss(tokens, targets)"
    raise IncompatibleModelError("strategy.name", message)

"""The base class of the parallelism strategies, and the training loss of all of them.

`ParallelStrategy` trains the full net on one rank (`strategy=single`). Its subclasses are
`ddp.Replicated`, `sharded.Sharded`, `sharded.TensorParallel`, `context.ContextParallel` and
`pipeline.Pipeline`. Every rank has one such object, which is built before the
net. It partitions the net, then computes losses, logits and the gradient norm. It does not depend
on Lightning.

The loss of a training step is computed by these functions, in this order. Each indented function is
called by the one above it:

    StepMean.begin_step            before the step: compute the divisor from the number of targets
    ParallelStrategy.mean_loss     for each micro-batch: divide the sum of its losses by the divisor
        count_and_get_divisor      count the targets of the micro-batch, and return the divisor
        ParallelStrategy.loss_sum  run the net and sum the losses over the targets, by
                                   `loss.chunked_next_token_loss` or `loss.next_token_loss`
    StepMean.reduce                after the last micro-step: average the losses, for the log

Nothing multiplies gradients after the backward pass. So whatever training_step adds to the loss
counts as it was written, and hooks see the gradients of a step as the optimizer gets them.
"""

# B batch, T time, C tokens of a chunk, D d_model, V vocab

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gptrain.core import labels
from gptrain.core.strategies import ParallelDims, StrategyOptions, default_options
from gptrain.loss import (
    IGNORED,
    LossOptions,
    chunked_next_token_loss,
    count_targets,
    cross_entropy_in_place,
    logits_in_chunks,
    next_token_loss,
    sum_dtype,
)
from gptrain.models.attention import layout_argument
from gptrain.parallel import state
from gptrain.parallel.gradients import clip_grad_norm, sum_gradients
from gptrain.parallel.requirements import IncompatibleModelError, Net

log = logging.getLogger(__name__)
OWN_TARGETS = (
    "the mean over the targets that self.loss was given, then over micro-steps and ranks: they are "
    "not those of a batch of data.train as it was loaded"
)
SINGLE_RANK = ParallelDims()
CPU = torch.device("cpu")

OptionsT = TypeVar("OptionsT", bound=StrategyOptions)


class StepMean:
    """Gives each loss of a step its divisor, before the backward pass, and averages the losses.

    Lightning and DDP average losses and gradients over micro-steps and data ranks. If each
    micro-batch divided by its own number of targets, the result would be a mean of means: with
    unevenly distributed targets it would depend on how the global batch is divided. The losses of
    batches whose targets gptrain's loader has counted are therefore divided by the same number:

        divisor = max(1, targets of the step on all data ranks) / (data ranks * micro-steps)

    Any other loss is the mean over the targets that it was given: if training_step or a hook
    changes the targets, or if the batch is of another form, the number of targets of the step is
    not known before its last micro-step.

    Args:
        group: Data ranks. None if there is only one.
        device: Device of the counts.

    Attributes:
        divisor: Divisor of the current step for targets that were counted, a scalar tensor.
        counted: Targets of the current micro-batch, if gptrain's loader has counted them, and their
            version: torch increases it when a tensor is changed in place. None for other batches.
        n_targets: Number of targets, over all data ranks, that the losses of the last step have
            counted, a scalar tensor. NaN if training_step does not call `LanguageModel.loss`.
        loss: Mean loss of the last step over all data ranks, a scalar tensor. NaN if
            `LanguageModel.loss` was called, but with no target that counts.
    """

    n_targets: Tensor
    loss: Tensor
    counted: tuple[Tensor, int] | None = None

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.group = group if group is not None and group.size() > 1 else None
        self.n_ranks = 1 if self.group is None else self.group.size()
        self.divisor = torch.ones((), dtype=sum_dtype(device), device=device)
        self._n_targets: Tensor | None = None  # of this rank's losses in this step; None: no loss
        self._has_explained = False

    def begin_step(self, n_targets: int, n_micro_batches: int) -> None:
        """Set `divisor` for the next step. All data ranks must call this before the step.

        Args:
            n_targets: Number of targets in this rank's micro-batches of the step.
            n_micro_batches: Number of micro-batches in which `n_targets` were counted.
        """
        total = self._all_reduce(torch.full_like(self.divisor, n_targets))
        self.divisor = total.clamp(min=1) / (self.n_ranks * n_micro_batches)
        self._n_targets = None

    def count_and_get_divisor(self, targets: Tensor) -> Tensor:
        """Count the targets of a loss, and return the number by which its sum is divided.

        The first loss of a run that does not get the targets of its batch is explained in one line.

        Args:
            targets: Next tokens (B, T) that are passed to the loss. -100 is not counted.
        """
        n_targets = (targets != IGNORED).sum()
        self._n_targets = n_targets if self._n_targets is None else self._n_targets + n_targets
        if self.counted is not None:
            known, version = self.counted
            if targets is known and targets._version == version:
                return self.divisor
        if not self._has_explained:
            self._has_explained = True
            log.info(labels.line("loss", OWN_TARGETS))
        return n_targets.clamp(min=1)

    def reduce(self, loss: Tensor) -> None:
        """Set `n_targets` and `loss` after the last micro-step. All data ranks must call this.

        Args:
            loss: Mean loss of this rank's micro-steps.
        """
        unknown = torch.full_like(self.divisor, math.nan)
        n_targets = unknown if self._n_targets is None else self._n_targets.to(unknown)
        self.n_targets, losses = self._all_reduce(torch.stack((n_targets, loss.to(unknown))))
        self.loss = (losses / self.n_ranks).where(self.n_targets != 0, math.nan)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the data ranks. The tensor is changed in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


@runtime_checkable
class DividesUpdates(Protocol):
    """An optimizer that divides its updates among the ranks that hold the same weights.

    Any optimizer with an attribute `replicas` counts as one. `ParallelStrategy.prepare` sets it.

    Attributes:
        replicas: Mesh of the ranks that hold the same weights. None if no other rank does.
    """

    replicas: DeviceMesh | None


@dataclass(eq=False)
class ParallelStrategy(Generic[OptionsT]):
    """Partition a net over the ranks, and compute its loss, logits and gradient norm on this rank.

    This base class is the strategy `single`: one rank that trains the full net. Subclasses override
    the partitioning (`split`, `shard`), parts of the loss, and what completes the gradients of a
    step. The attributes up to `precision` are arguments of the constructor. Those up to
    `data_group` are set by `__post_init__` of a subclass. Then follow the state of a run, and facts
    about a subclass, from `is_partitioned` on.

    Attributes:
        options: Options of the `strategy` group.
        dims: Number of ranks along each axis. The process group must exist before a subclass is
            built.
        device: Device of this rank.
        precision: Precision as Lightning names it, for example `bf16-mixed`.
        ddp_arguments: Keyword arguments of DistributedDataParallel. None if it is not used.
        comm_hook: State and hook for DistributedDataParallel.register_comm_hook. None for its
            default all-reduce.
        replicas: Ranks that hold the same weights and gradients, and so can divide the work of
            Muon. None if no other rank does.
        data_group: Ranks that read different samples of the same step. None if there is only one.
        step_mean: Divisor of the losses. Set inside of training_step only, otherwise None.
        extra_parameters: Parameters of the LightningModule outside `net` whose gradients this
            object averages.
        counted_on_other_stage: Parameters that another pipeline stage counts in the gradient norm.
        forward_only: True if the loss must be computed from `forward`, although the net has
            `hidden` and `head`.
        may_pad: False if padding at the end of a sequence would change the outputs of the net.
        may_skip_parameters: True if a rank's backward pass may leave out parameters that another
            rank uses, as in a net of the user.
        is_partitioned: True if ranks hold different parts of the net, or compute different parts of
            a sequence. Saves can then be sharded.
        is_pipeline: True if a schedule runs the stages of a pipeline. No rank can then call the
            net, and `mean_loss` also computes the gradients.
        n_stages: Number of pipeline stages.
        microbatches: Number of equal parts into which a pipeline divides a training batch.
        stages: Ranks that hold the pipeline stages, and the parameter names of a checkpoint.
        chunked_loss: Function that computes the loss of hidden states (B, T, D) under a head
            weight (V, D).
    """

    options: OptionsT = field(default_factory=lambda: cast(OptionsT, default_options("single")))
    dims: ParallelDims = SINGLE_RANK
    device: torch.device = CPU
    precision: str = "32-true"
    ddp_arguments: dict[str, Any] | None = None
    comm_hook: tuple[object, Callable] | None = None
    replicas: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None
    step_mean: StepMean | None = None
    extra_parameters: Sequence[nn.Parameter] = ()
    counted_on_other_stage: Set[nn.Parameter] = frozenset()

    forward_only: bool = False
    may_pad: bool = True
    may_skip_parameters: bool = False

    is_partitioned = False
    is_pipeline = False
    n_stages = 1
    microbatches = 1
    stages = state.NO_STAGES
    chunked_loss = staticmethod(chunked_next_token_loss)

    def __post_init__(self) -> None:
        """Create the process groups of the strategy. The base class needs none."""

    @property
    def activation_group(self) -> dist.ProcessGroup | None:
        """Ranks that each hold a shard of a module's output. None if every rank holds all of it."""
        return None

    def compile_loss(self) -> None:
        """Compile the loss of a chunk of logits, if this device is a GPU.

        On a GPU the uncompiled loss takes a quarter of a step of GPT-2. On a CPU the compiled loss
        is slower. The loss of a vocabulary that is split over ranks is never compiled.
        """
        # A subclass may have replaced the chunked loss.
        if self.device.type == "cuda" and self.chunked_loss is chunked_next_token_loss:
            compiled = torch.compile(cross_entropy_in_place, fullgraph=True)
            self.chunked_loss = partial(chunked_next_token_loss, cross_entropy=compiled)

    # Partitioning, while the net is built

    def split(self, net: Net) -> None:
        """Split layers or blocks in place, before activation checkpointing and compile.

        The base class does nothing.
        """

    def shard(self, net: Net) -> None:
        """Shard the parameters in place, after activation checkpointing and compile.

        The base class does nothing.
        """

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Connect the strategy with the module and its optimizer, once both are built.

        An optimizer with an attribute `replicas`, such as Muon, gets the mesh of the ranks that
        hold the same weights, to divide its work among them. A partitioning strategy records
        `extra_parameters`, the parameters of the module outside `net`, whose gradients it averages.

        Args:
            module: LightningModule, or any module with an attribute `net`.
            optimizer: Optimizer of the module.
        """
        if isinstance(optimizer, DividesUpdates):
            optimizer.replicas = self.replicas
        if self.is_partitioned:
            self.extra_parameters = [*state.named_extra_parameters(module).values()]

    # Loss and logits

    def mean_loss(
        self,
        net: Net,
        tokens: Tensor,
        targets: Tensor,
        options: LossOptions,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss in nats per target of this rank's samples.

        In training the sum of the losses of a batch's own targets is divided by
        `StepMean.divisor`. The mean of the returned values over the micro-steps and the data ranks
        of a step is then the mean over all targets of the step. For other targets, under
        torch.no_grad, and outside of a training_step, the divisor is the number of these targets;
        the mean of no target is 0. All ranks between which the net or a sequence is divided must
        call this method.

        Args:
            net: Net as `split` and `shard` have left it.
            tokens: Token ids (B, T), int64.
            targets: Next tokens (B, T), int64. The loss ignores -100.
            options: Label smoothing and z-loss.
            documents: Index of the document of each token, (B, T), int64, if documents are packed
                that must not see each other.

        Raises:
            IncompatibleModelError: If the net is called for its logits, and does not return logits
                (B, T, V).
        """
        divisor = self.count_and_get_divisor(targets)
        total = self.loss_sum(net, tokens, targets, options, documents)
        return total / divisor.to(total.dtype)

    def count_and_get_divisor(self, targets: Tensor) -> Tensor:
        """Return the number by which the sum of the losses of these targets is divided.

        In a training_step with gradients it is that of `StepMean.count_and_get_divisor`. Otherwise
        it is the number of targets that are not -100, at least 1.

        Args:
            targets: Next tokens (B, T).
        """
        if self.step_mean is not None and torch.is_grad_enabled():
            return self.step_mean.count_and_get_divisor(targets)
        return count_targets(targets)

    def loss_sum(
        self,
        net: Net,
        tokens: Tensor,
        targets: Tensor,
        options: LossOptions,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Run the net on this rank's samples and return the sum of the losses in nats.

        The logits (B, T, V) are never stored in full if the net has `hidden` and a `head` without
        bias.

        Args:
            net: Net as `split` and `shard` have left it.
            tokens: Token ids (B, T), int64.
            targets: Next tokens (B, T), int64. The loss ignores -100.
            options: Label smoothing and z-loss.
            documents: Index of the document of each token, (B, T), if documents are packed that
                must not see each other; otherwise None.

        Raises:
            IncompatibleModelError: If the net is called for its logits, and does not return logits
                (B, T, V).
        """
        if self.uses_hidden(net):
            hidden = net.hidden(tokens, **layout_argument(documents))
            return self.head_loss(net, hidden, targets, options)
        logits = net_logits(net, tokens, targets, documents)
        return next_token_loss(logits, targets, reduction="sum", **asdict(options))

    def uses_hidden(self, net: nn.Module) -> bool:
        """Return whether the loss is computed from `hidden` and `head` of the net."""
        return not self.forward_only and supports_chunked_loss(net)

    def logits_of_parts(self, net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return logits (B, T, V) by those parts of a full net from which the loss is computed.

        Args:
            net: Full net on one rank, with `hidden` and `head`.
            tokens: Token ids (B, T).
            targets: Next tokens (B, T), not used.
        """
        return F.linear(net.hidden(tokens), net.head.weight)

    def check_length(self, n_positions: int) -> None:
        """Check that sequences of a length need no padding that would change the net's outputs.

        Raises:
            IncompatibleModelError: If they do.
        """
        n_ranks = 1 if self.activation_group is None else self.activation_group.size()
        if not self.may_pad and n_positions % n_ranks:
            raise IncompatibleModelError(
                "strategy.name",
                f"a sample has {n_positions} positions, which {n_ranks} ranks do not divide, and "
                f"padding would change this net's outputs; try: {n_positions // n_ranks * n_ranks}",
            )

    def head_loss(self, net: Net, hidden: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        """Return the sum of the losses in nats of hidden states, through `net.head`.

        The logits are computed in chunks, unless the head has a bias.

        Args:
            net: Net with `head`, an nn.Linear.
            hidden: Hidden states (..., D) after the final norm.
            targets: Next tokens (...). The loss ignores -100.
            options: Label smoothing and z-loss.
        """
        if net.head.bias is not None:
            logits = net.head(hidden)
            return next_token_loss(logits, targets, reduction="sum", **asdict(options))
        weight = net.head.weight
        return self.chunked_loss(hidden, weight, targets, reduction="sum", **asdict(options))

    @torch.no_grad()
    def logits(
        self, net: Net, tokens: Tensor, targets: Tensor, documents: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's logits (C, V) and targets (C,) of C positions at a time, for metrics.

        Positions whose target is -100 are left out. No gradients are computed.

        Args:
            net: Net as `split` and `shard` have left it.
            tokens: Token ids (B, T), int64.
            targets: Next tokens (B, T), int64.
            documents: Index of the document of each token, (B, T), or None.

        Raises:
            IncompatibleModelError: If the net is called for its logits, and does not return logits
                (B, T, V).
        """
        if self.uses_hidden(net):
            hidden = net.hidden(tokens, **layout_argument(documents))
            return logits_in_chunks(hidden, net.head, targets)
        logits = net_logits(net, tokens, targets, documents)
        return logits_in_chunks(logits, nn.Identity(), targets)

    def broadcast_metric(self, compute: Callable[[], Any]) -> Any:
        """Compute a metric on a rank that has logits, and return the value on every rank.

        All ranks must call this method. The base class calls `compute` on every rank, because every
        rank has logits. A pipeline calls `compute` on its last stage only, and sends the value to
        the other stages.

        Args:
            compute: Function without arguments that returns the metric's value.
        """
        return compute()

    # Gradients of a step

    def without_gradient_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients without communication.

        It surrounds all micro-steps of a step except the last one. The context of the base class
        does nothing.
        """
        return nullcontext()

    def finish_gradients(self) -> None:
        """Complete the gradients once per step, after the last backward pass.

        Averages the gradients of `extra_parameters` over the data ranks. A net on one rank, or
        under DDP, needs nothing else. All ranks must call this method.
        """
        self.average(self.extra_parameters)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of parameters over the data ranks, in place.

        All data ranks must call this method. Does nothing if there is only one data rank.

        Args:
            parameters: Parameters whose gradients are averaged. A rank without the gradient of one
                adds zeros, unless `strategy.find_unused_parameters` is false.

        Raises:
            IncompatibleModelError: If it is false, and the ranks use different parameters.
        """
        group = self.gradient_group
        if group is not None:
            sum_gradients(parameters, group, group.size(), finds_unused=self.finds_unused)

    @property
    def gradient_group(self) -> dist.ProcessGroup | None:
        """Ranks that average their gradients. None if there is only one."""
        return self.data_group

    @property
    def finds_unused(self) -> bool:
        """Value of `strategy.find_unused_parameters`. True if the strategy has no such key."""
        return getattr(self.options, "find_unused_parameters", True)

    def measure_and_clip(self, parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
        """Clip all gradients to `max_norm`, and return their norm before clipping.

        All ranks that take the step together must call this method, because the norm is summed over
        them.

        Args:
            parameters: Parameters that this rank trains.
            max_norm: Largest norm after clipping. None or 0 does not clip.

        Returns:
            Norm of the gradients of the entire net. The value is identical on all ranks that take
            the step together.
        """
        return clip_grad_norm(
            parameters,
            max_norm,
            groups=() if self.stages.group is None else (self.stages.group,),
            counted_on_other_stage=self.counted_on_other_stage,
        )

    def check_gradients(self) -> None:
        """Check that no hook has changed gradients of which this rank has only a part.

        The base class has nothing to check.
        """


def supports_chunked_loss(net: nn.Module) -> bool:
    """Return whether the loss can be computed in chunks: the net has `hidden` and `head`.

    `head` must be an nn.Linear without bias.
    """
    head = getattr(net, "head", None)
    return hasattr(net, "hidden") and isinstance(head, nn.Linear) and head.bias is None


def net_logits(
    net: nn.Module, tokens: Tensor, targets: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Run the net on tokens (B, T) and return its logits (B, T, V).

    Args:
        net: Net, which is called with the tokens and, if `documents` is given, with a `layout`.
        tokens: Token ids (B, T).
        targets: Next tokens (B, T), only to check the shape of the logits.
        documents: Index of the document of each token, (B, T), or None.

    Raises:
        IncompatibleModelError: If the net returns no tensor, for example a tuple, or a tensor whose
            shape is not that of `targets` and one more dimension.
    """
    logits = net(tokens, **layout_argument(documents))
    is_tensor = isinstance(logits, Tensor)
    if not is_tensor or logits.shape[:-1] != targets.shape:
        name = type(net).__name__.removeprefix("FSDP")  # FSDP2 adds it to the class of a net
        result = f"shape {tuple(logits.shape)}" if is_tensor else f"a {type(logits).__name__}"
        raise IncompatibleModelError(
            "model._target_",
            f"{name}.forward returns {result} for tokens of shape "
            f"{tuple(tokens.shape)}; allowed: logits (B, T, V)",
        )
    return logits

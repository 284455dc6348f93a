"""Parallel: how one rank's part of a net is made, and how losses and gradients are computed.

The sizes of the four axes of a device mesh (pipeline, data, context, tensor) and the options of the
strategy decide what a `Parallel` does. `pipeline.Pipeline` is its only subclass, because a pipeline
schedule also runs the backward pass.

The loss of a training step is computed by these functions, in this order. Each indented function is
called by the one above it:

    StepMean.begin_step            before the step: compute the divisor from the number of targets
    Parallel.mean_loss             for each micro-batch: divide the sum of its losses by the divisor
        StepMean.count_and_get_divisor
                                   count the targets of the micro-batch, and return the divisor
        Parallel.loss_sum          run the net and sum the losses over the targets, by
                                   `loss.chunked_loss_sum` or `loss.token_losses`
    StepMean.reduce                after the last micro-step: average the losses, for the log

Nothing multiplies gradients after the backward pass. So whatever training_step adds to the loss
counts as it was written, and hooks see the gradients of a step as the optimizer gets them.
"""

# B batch, T time, C tokens of a chunk, D d_model, V vocab

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, Adagrad, Optimizer

from gptrain.core.strategies import (
    CONTEXT,
    DATA,
    STRATEGIES,
    TENSOR,
    ParallelDims,
    ShardedOptions,
    default_options,
    strategy_name,
)
from gptrain.loss import (
    IGNORED,
    LossOptions,
    chunked_loss_sum,
    count_targets,
    cross_entropy_in_place,
    logits_in_chunks,
    token_losses,
)
from gptrain.models.attention import layout_argument
from gptrain.parallel import state
from gptrain.parallel.activation import apply_activation_checkpointing, apply_compile
from gptrain.parallel.context import apply_context_parallel, part_layout, sum_over_parts
from gptrain.parallel.data_parallel import apply_fsdp, watch_use
from gptrain.parallel.gradients import check_use, clip_grad_norm, sum_gradients
from gptrain.parallel.mesh import build_mesh, build_shard_mesh
from gptrain.parallel.requirements import IncompatibleModelError, Net
from gptrain.parallel.step_mean import StepMean
from gptrain.parallel.tensor import apply_tensor_parallel, partial_parameters, vocab_parallel_loss


class Batch(NamedTuple):
    """Samples that a rank reads in one micro-step.

    Attributes:
        tokens: Token ids, (B, T), int64.
        targets: Next tokens, (B, T), int64. The loss ignores targets that are -100.
        documents: Index of each token's document, (B, T), int64. None if a token may attend to all
            tokens before it in its sample.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None


@dataclass(eq=False)
class Parallel:
    """Partition a net over the ranks, and compute its loss, logits and gradients on this rank.

    All ranks must build the object, which creates the device mesh. The process group must exist,
    except under `single`, the strategy of one device. For PipelineOptions build a `Pipeline`.

    Call `partition` once while the net is built, and `prepare` once its optimizer is built.

    Attributes:
        options: `strategy` section of the config.
        dims: Number of ranks along each axis.
        device: Device of this rank.
        precision: Precision as Lightning names it.
        weights_device: Device of the weights: the CPU if they are offloaded, else `device`.
        name: Key of STRATEGIES: for "auto" it is `single` or `ddp`.
        axes: Axes over which the strategy divides the work, also if one has a single rank. Empty
            under `single`.
        is_partitioned: True if ranks hold different parts of the net, or compute different parts of
            a sequence.
        data_group: Group of this rank and the ranks that read other samples of the same step. None
            under `single`.
        step_mean: Divisor of the losses. `GPTStrategy` sets it inside of training_step. None
            outside.
        forward_only: True if the loss must be computed from `forward`, although the net has
            `hidden` and `head`. `Comparison.check` sets it.
        may_skip_parameters: True if a rank's backward pass may leave out parameters that another
            rank uses, as in a net of the user. `build_strategy` sets it.
        is_pipeline: True if no rank can call the net, and `loss_sum` also computes the gradients.
        microbatches: Number of parts into which a pipeline divides a batch, 1 without a pipeline.
        stage_group: Group of the ranks of the pipeline. None without a pipeline.
    """

    options: Any = field(default_factory=partial(default_options, "single"))
    dims: ParallelDims = field(default_factory=ParallelDims)
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    precision: str = "32-true"
    _net: Any = field(default=None, init=False)
    step_mean: StepMean | None = field(default=None, init=False)
    _extra_parameters: Sequence[nn.Parameter] = field(default=(), init=False)
    _used: set[str] | None = field(default=None, init=False)
    forward_only = False
    may_skip_parameters = False
    is_pipeline = False
    microbatches = 1
    stage_group: dist.ProcessGroup | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.weights_device = "cpu" if getattr(self.options, "cpu_offload", False) else self.device
        self.name = strategy_name(self.options.name, self.dims.world_size)
        self.axes = STRATEGIES[self.name].axes
        self._shards = isinstance(self.options, ShardedOptions)
        self.is_partitioned = self._shards or not {DATA}.issuperset(self.axes)
        self._mesh: Any = build_mesh(self.device.type, self.dims) if self.axes else None
        self._shard_mesh = build_shard_mesh(self._mesh, self.dims) if self._shards else None
        self.data_group = self._mesh.get_group(DATA) if self.axes else None
        if self.axes and not self.is_partitioned:  # DDP's own group, without another communicator
            self.data_group = dist.group.WORLD
        # Ranks that average their gradients: those of the data and the context axes.
        is_shared = CONTEXT in self.axes and self._shard_mesh is not None
        self._gradient_group: Any = self._shard_mesh.get_group() if is_shared else self.data_group
        self._finds_unused = getattr(self.options, "find_unused_parameters", True)
        # A tensor axis divides the rows of the head.
        self._chunked_loss: Any = vocab_parallel_loss if TENSOR in self.axes else chunked_loss_sum

    # Partitioning, while the net is built

    def partition(self, net: Net, activation_checkpointing: str, compile: str) -> None:
        """Turn a full net into the part that this rank holds, in place. All ranks must call it.

        Args:
            net: Net that `check_fit` has accepted, with its weights or on the meta device.
            activation_checkpointing: Mode of `apply_activation_checkpointing`.
            compile: Mode of `apply_compile`. Any but "none" also compiles the loss on CUDA.

        Raises:
            IncompatibleModelError: As in `apply_activation_checkpointing`.
        """
        self._net = net
        self._split(net)
        apply_activation_checkpointing(net, activation_checkpointing)
        apply_compile(net, compile)
        if self._shard_mesh is not None:
            apply_fsdp(net, self._shard_mesh, self.options, self.precision)
        # On a CPU the compiled cross entropy is slower. A divided vocabulary has its own loss.
        if compile != "none" and self.device.type == "cuda" and TENSOR not in self.axes:
            compiled = torch.compile(cross_entropy_in_place, fullgraph=True)
            self._chunked_loss = partial(chunked_loss_sum, cross_entropy=compiled)

    def _split(self, net: Net) -> None:
        """Split layers and sequences in place, before activation checkpointing and compile."""
        if TENSOR in self.axes:
            apply_tensor_parallel(net, self._mesh)
        if CONTEXT in self.axes:
            apply_context_parallel(net, self._mesh.get_group(CONTEXT))

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Prepare this object and the optimizer for the steps, once module and optimizer are built.

        Changes the optimizer: its attribute `replicas`, if it has one, becomes the data axis of the
        mesh if the ranks of this axis hold the same weights, without FSDP2; otherwise None. In the
        parameter groups of a partitioned net, `fused` and `foreach` are switched off where torch
        has no such kernel for the parameters.
        """
        if hasattr(optimizer, "replicas"):
            # Ranks that hold the same weights and gradients can divide the work of Muon.
            has_copies = DATA in self.axes and not self._shards
            cast(Any, optimizer).replicas = self._mesh[DATA] if has_copies else None
        if not self.is_partitioned:
            return
        self._extra_parameters = [*state.named_extra_parameters(module).values()]
        if self.may_skip_parameters and isinstance(self._net, FSDPModule):
            self._used = watch_use(self._net)
        plain = {*self._extra_parameters}  # all others are DTensors, except in a pipeline
        for group in optimizer.param_groups if not self.is_pipeline else ():
            if isinstance(optimizer, SGD | Adagrad) and group["fused"]:
                group["fused"] = None  # torch chooses the implementation
            if plain & {*group["params"]} and not plain.issuperset(group["params"]):
                group |= {key: False for key in ("foreach", "fused") if key in group}

    # Loss and logits

    def mean_loss(self, net: Net, batch: Batch, options: LossOptions) -> Tensor:
        """Return the mean loss in nats per target of this rank's samples, a scalar.

        Inside of training_step, with gradients enabled and with the unchanged targets of gptrain's
        loader, the mean of the returned values over micro-steps and data ranks is the mean over all
        targets of the step: the sum of the losses is divided by the same number in each of them. In
        all other cases the sum is divided by the number of the given targets, at least 1.

        All ranks between which the net or a sequence is divided must call this method.

        Args:
            net: Net as `partition` has changed it.
            batch: Samples that this rank reads. Ranks that share them pass the same.
            options: Label smoothing and z-loss.

        Raises:
            IncompatibleModelError: If the net does not return logits (B, T, V).
        """
        if self.step_mean is not None and torch.is_grad_enabled():
            divisor = self.step_mean.count_and_get_divisor(batch.targets)
        else:
            divisor = count_targets(batch.targets)
        total = self.loss_sum(net, batch, options)
        return total / divisor.to(total.dtype)

    def loss_sum(self, net: Net, batch: Batch, options: LossOptions) -> Tensor:
        """Return the sum of the losses in nats of this rank's samples, a scalar.

        The full logits (B, T, V) are never in memory if `uses_hidden(net)`. Arguments and errors
        are those of `mean_loss`, and the same ranks must call it. Ranks that share samples get the
        same sum.
        """
        tokens, targets, documents = batch
        layout: dict[str, Any] = layout_argument(documents)
        group = self._mesh.get_group(CONTEXT) if CONTEXT in self.axes else None
        if group is not None:
            part = part_layout(tokens, group, **layout)
            # The targets were shifted before they are divided, so the target of a part's last
            # position is the first token of the next part.
            tokens = tokens[:, part.index]
            targets = targets[:, part.index].masked_fill(part.is_padding, IGNORED)
            layout = {"layout": part}
        if self.uses_hidden(net):
            total = self.head_loss(net, net.hidden(tokens, **layout), targets, options)
        else:
            logits = net_logits(net, tokens, targets, **layout)
            total = token_losses(logits, targets, options).sum()
        return total if group is None else sum_over_parts(total, group)

    def uses_hidden(self, net: nn.Module) -> bool:
        """Return whether the loss is computed from `hidden` and `head` of a net, not `forward`.

        This is so if the net has `hidden`, and a `head` that is an nn.Linear without bias, unless
        `forward_only` is True.
        """
        head = getattr(net, "head", None)
        has_parts = hasattr(net, "hidden") and isinstance(head, nn.Linear) and head.bias is None
        return has_parts and not self.forward_only

    def head_loss(self, net: Net, hidden: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        """Return the sum of the losses in nats of hidden states, a scalar.

        Args:
            net: Net with a `head` that is an nn.Linear. With a bias the full logits are in memory.
            hidden: Hidden states (B, T, D) after the final norm.
            targets: Target token ids, (B, T). Targets that are -100 do not count.
            options: Label smoothing and z-loss.
        """
        if net.head.bias is not None:
            return token_losses(net.head(hidden), targets, options).sum()
        return self._chunked_loss(hidden, net.head.weight, targets, options)

    def logits_of_parts(self, net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the logits (B, T, V) of a full net, by the parts that the strategy calls.

        These are `hidden` and `head`, or the parts of the stages of a pipeline. `targets` is
        ignored.
        """
        return F.linear(net.hidden(tokens), net.head.weight)

    @torch.no_grad()
    def logits(self, net: Net, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits (C, V), in fp32 or fp64, and targets (C,) of some positions at a time.

        Positions with target -100 are left out, and no gradient is computed. Arguments and errors
        are those of `mean_loss`. All ranks between which the net or a sequence is divided must
        iterate. Each of them gets all positions, but in a pipeline only the last stage gets any.
        """
        tokens, targets, documents = batch
        layout = layout_argument(documents)
        if self.uses_hidden(net):
            return logits_in_chunks(net.hidden(tokens, **layout), net.head, targets)
        return logits_in_chunks(net_logits(net, tokens, targets, **layout), nn.Identity(), targets)

    def broadcast_metric(self, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, a function without arguments. Collective in a pipeline.

        A pipeline calls it on its last stage only, and all ranks of the pipeline get the result.
        """
        return compute()

    # Gradients of a step

    @cached_property
    def partial_parameters(self) -> list[nn.Parameter]:
        """Parameters whose full gradient is the sum of the gradients of all tensor ranks."""
        return partial_parameters(self._net) if TENSOR in self.axes else []

    def finish_gradients(self) -> None:
        """Complete the gradients once per step, after the last backward pass. Collective.

        DDP and FSDP have averaged gradients over the ranks in the backward pass. This method
        completes those that they leave out, in place.

        Raises:
            IncompatibleModelError: If the ranks use different parameters, without
                `strategy.find_unused_parameters`.
        """
        self._average(self._extra_parameters)
        if self._used is not None:
            named = self._net.named_parameters()
            is_used = {p: name in self._used for name, p in named if p.requires_grad}
            self._used.clear()
            check_use(is_used, self._gradient_group, self._finds_unused)
        if TENSOR in self.axes:
            sum_gradients(self.partial_parameters, self._mesh.get_group(TENSOR))

    def _average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average gradients over `_gradient_group`. Collective. Errors as in `finish_gradients`."""
        group = self._gradient_group
        is_used = {p: p.grad is not None for p in parameters if p.requires_grad}
        if is_used and group.size() > 1:
            check_use(is_used, group, self._finds_unused)
            sum_gradients(is_used, group, divisor=group.size())

    def measure_and_clip(self, parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
        """Scale gradients in place so that their norm is at most `max_norm`. Collective.

        Args:
            parameters: Parameters of the optimizer on this rank. Those without a gradient are left
                out.
            max_norm: Largest L2 norm of all gradients together. None or 0 changes no gradient.

        Returns:
            The norm of all gradients of all ranks before, a scalar tensor, the same on all ranks.
        """
        return clip_grad_norm(parameters, max_norm)

    def check_gradients(self) -> None:
        """Do nothing. In a pipeline see `Pipeline.check_gradients`."""


def net_logits(net: nn.Module, tokens: Tensor, targets: Tensor, **layout: Any) -> Tensor:
    """Run the net on tokens (B, T) and return its logits (B, T, V).

    `layout` has further keyword arguments of the net. Raises an IncompatibleModelError unless the
    net returns a tensor of the shape of `targets` (B, T) and one more dimension.
    """
    logits = net(tokens, **layout)
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    if shape[:-1] != targets.shape:
        name = type(net).__name__.removeprefix("FSDP")  # FSDP2 adds it to the class of a net
        message = f"{name}.forward returns {shape} for tokens {tuple(tokens.shape)}"
        raise IncompatibleModelError("model._target_", f"{message}; allowed: logits (B, T, V)")
    return logits

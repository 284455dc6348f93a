"""How a rank trains the net that it holds: here a whole one, alone. The others are made of it.

One object for each rank, made before the net: it partitions the net where its strategy does, and
then computes losses, logits and the norm of the gradients. It knows nothing of Lightning.
"""

# B batch, T time, C tokens of a chunk, D d_model, V vocab

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gptrain.core.strategies import ParallelDims, StrategyOptions, default_options
from gptrain.loss import (
    LossOptions,
    chunked_next_token_loss,
    count_targets,
    logits_in_chunks,
    next_token_loss,
)
from gptrain.parallel import state
from gptrain.parallel.gradients import clip_grad_norm, sum_gradients
from gptrain.parallel.requirements import Net
from gptrain.parallel.step_mean import StepMean

ALONE, CPU = ParallelDims(), torch.device("cpu")


OptionsT = TypeVar("OptionsT", bound=StrategyOptions)


@runtime_checkable
class DividesUpdates(Protocol):
    """An optimizer whose updates are divided among the ranks that hold the same weights."""

    replicas: DeviceMesh | None


@dataclass(eq=False)
class ParallelStrategy(Generic[OptionsT]):
    """A whole net, trained by this rank alone.

    Attributes:
        options: the `strategy` group.
        dims: ranks along each axis; but for `single` their process group exists.
        device: of this rank.   precision: Lightning's name.
        ddp: options of DistributedDataParallel; None: it is not used.
        comm: state and hook by which it sends gradients; None: its own.
        replicas: ranks that hold the same weights and gradients, and divide Muon's work.
        data_group: ranks that see different samples and take a step together; None: there is one.
        step_group: ranks that take a step together; None: all.
        accumulate: micro-steps of a step.
        step_mean: of the training step that is going on; None: there is none.
        beside: parameters of the module beside its net, where this object averages their gradients.
        elsewhere: parameters that another stage of the pipeline counts in the norm.
        partitions: ranks hold different parts of the net, so that its saves may be sharded.
        by_stages: a schedule runs the stages of a pipeline: no rank can run the net, not even with
            the others' help, and `mean_loss` forms the gradients too.
        n_stages: Number of stages of a pipeline.
        microbatches: Number of equal parts into which a training batch is divided.
        stages: what a state must know of a pipeline.
    """

    options: OptionsT = field(default_factory=lambda: cast(OptionsT, default_options("single")))
    dims: ParallelDims = ALONE
    device: torch.device = CPU
    precision: str = "32-true"
    n_nodes: int = 1
    ddp: dict[str, Any] | None = None
    comm: tuple[object, Callable] | None = None
    replicas: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None
    step_group: dist.ProcessGroup | None = None
    accumulate: int = 1
    step_mean: StepMean | None = None
    beside: Sequence[nn.Parameter] = ()
    elsewhere: Set[nn.Parameter] = frozenset()

    partitions = by_stages = False
    n_stages = microbatches = 1
    stages = state.NO_STAGES
    # Of hidden states (B, T, D) under a head's weight (V, D).
    chunked_loss = staticmethod(chunked_next_token_loss)

    def __post_init__(self) -> None:
        """Makes the groups of ranks; here there are none."""

    @property
    def slice_group(self) -> dist.ProcessGroup | None:
        """Ranks of which each holds a slice of a module's output; None if each has all of it."""
        return None

    # Partitioning, while the net is made

    def split(self, net: Net) -> None:
        """Partitions layers or blocks in place, before checkpointing and compile; here nothing."""

    def shard(self, net: Net) -> None:
        """Partitions in place what they leave, after them; here nothing."""

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Prepare the training, once the module and its optimizer are complete.

        An optimizer with an attribute `replicas`, as Muon, divides its work among the ranks that
        hold the same weights.
        """
        if isinstance(optimizer, DividesUpdates):
            optimizer.replicas = self.replicas
        if self.partitions:
            self.beside = [*state.named_extra_parameters(module).values()]

    # What the planner asks for when it traces a step

    @property
    def sent_dtype(self) -> torch.dtype | None:
        """Type in which DDP sends gradients, or None for their own."""
        return None

    def extra_state(self) -> list[Tensor]:
        """Return the tensors that the strategy stores in addition to parameters and optimizer."""
        return []

    def periodic_work(self) -> list[tuple[Callable[[], None], float]]:
        """Return what is done in some steps only, each with the fraction of the steps."""
        return []

    # What a module asks for

    def mean_loss(self, net: Net, tokens: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        """Mean loss in nats over the targets that count; in training over those of the whole step.

        There it is the sum over these targets, divided by what a micro-batch of a data rank has of
        them on average: means of it over micro-steps and data ranks are means over targets.
        """
        divisor, total = self.divisor(targets), self.loss_sum(net, tokens, targets, options)
        return total / divisor.to(total.dtype)

    def divisor(self, targets: Tensor) -> Tensor:
        """What the sum of the losses of these targets is divided by."""
        if self.step_mean is not None and torch.is_grad_enabled():
            return self.step_mean.divisor_of(targets)
        return count_targets(targets)

    def loss_sum(self, net: Net, tokens: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        """Sum of the losses of this rank's samples in nats."""
        if has_chunks(net):
            return self.head_loss(net, net.hidden(tokens), targets, options)
        logits = net_logits(net, tokens, targets)
        return next_token_loss(logits, targets, reduction="sum", **asdict(options))

    def head_loss(self, net: Net, hidden: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        """Sum of the losses of hidden states (..., D); in chunks where the head has no bias."""
        if net.head.bias is not None:
            return next_token_loss(net.head(hidden), targets, reduction="sum", **asdict(options))
        weight = net.head.weight
        return self.chunked_loss(hidden, weight, targets, reduction="sum", **asdict(options))

    @torch.no_grad()
    def logits(self, net: Net, tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits (C, V) and targets (C,) of this rank's samples, chunk by chunk, for metrics."""
        if has_chunks(net):
            return logits_in_chunks(net.hidden(tokens), net.head, targets)
        return logits_in_chunks(net_logits(net, tokens, targets), nn.Identity(), targets)

    def broadcast_metric(self, compute: Callable[[], Any]) -> Any:
        """Return what is computed where the logits were, the same on all ranks of a net."""
        return compute()

    # A step's gradients

    def without_gradient_sync(self) -> AbstractContextManager[None]:
        """Inside the block a backward pass adds gradients up locally; here that is all it does."""
        return nullcontext()

    def finish_gradients(self) -> None:
        """What is left to do once a step after the last backward pass.

        Whoever partitions a net averages over the data axis what the module has beside it.
        """
        self.average(self.beside)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages gradients over the data axis, if there is one."""
        if self.data_group is not None:
            sum_gradients(parameters, self.data_group, divisor=self.data_group.size())

    def measure_and_clip(
        self, parameters: list[nn.Parameter], max_norm: float | None, scale: Tensor | None
    ) -> Tensor:
        """Norm of all gradients times scale, alike on all ranks; scaled down to max_norm."""
        groups = [self.stages.group] if self.stages.group is not None else []
        more = {"groups": groups, "elsewhere": self.elsewhere}
        return clip_grad_norm(parameters, max_norm, scale=scale, **more)


def has_chunks(net: nn.Module) -> bool:
    """Whether the net allows the chunked loss: `hidden`, and a `head` without bias."""
    head = getattr(net, "head", None)
    return hasattr(net, "hidden") and isinstance(head, nn.Linear) and head.bias is None


def net_logits(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Logits (B, T, V) of tokens (B, T).   Raises: ValueError for any other shape."""
    logits = net(tokens)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"{type(net).__name__} made {tuple(logits.shape)} of tokens {tuple(tokens.shape)}; "
            f"a net's forward returns logits (B, T, V)"
        )
    return logits

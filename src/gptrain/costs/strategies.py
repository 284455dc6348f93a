"""Facts about strategies that the planner asks for: what a rank stores and what it sends.

The row of a strategy in `core.strategies.STRATEGIES` names its class here, or a
class of another package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

from gptrain.core import strategies
from gptrain.core.strategies import (
    DATA,
    PIPELINE,
    TENSOR,
    DDPOptions,
    DiLoCoOptions,
    ParallelDims,
    PipelineOptions,
    ShardedOptions,
    StrategyOptions,
)
from gptrain.costs.communication import Traffic, all_reduce_bytes, gather_bytes

if TYPE_CHECKING:
    from gptrain.costs.work import Work

OptionsT = TypeVar("OptionsT", bound=StrategyOptions)


class StepMemory(NamedTuple):
    """Bytes of a rank that depend on the strategy, during an optimizer step.

    Attributes:
        copies: Copies of weights, gathered or in 16 bits, and buckets, until the backward pass.
        early: Gradients that are stored during a forward pass.
        block: Extra bytes during the backward pass of one block.
        last: Total extra bytes when the gradient of the token table is added, which is the end of
            the backward pass.
    """

    copies: float
    early: float
    block: float
    last: float


@dataclass(frozen=True)
class StrategyCosts(Generic[OptionsT]):
    """What a strategy stores and sends. This base class trains a full copy and sends nothing.

    Attributes:
        options: The `strategy` group.
        dims: Number of ranks along each axis.
        shards_weights: True if ranks store shards of the weights and gather them for each pass.
    """

    options: OptionsT
    dims: ParallelDims
    shards_weights: ClassVar[bool] = False

    # Division of the work

    @property
    def step_ranks(self) -> int:
        """Number of data ranks that average their gradients in each step."""
        return self.dims.data

    @property
    def n_shards(self) -> int:
        """Number of ranks over which parameters, gradients and states are sharded."""
        return 1

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that one rank holds."""
        return 1

    @property
    def microbatches(self) -> int:
        """Number of parts of a micro-step that follow each other through a pipeline."""
        return 1

    # Memory

    @property
    def extra_per_parameter(self) -> float:
        """Values stored per parameter in addition to weight, gradient and optimizer state."""
        return 0

    def live_microbatches(self, rank: int) -> float:
        """Return how many microbatches' activations a rank of the pipeline holds at once."""
        return 1

    def stores_gradients(self, work: Work) -> bool:
        """Return whether gradients are stored during a forward pass."""
        return work.accumulate > 1 or self.microbatches > 1

    def bucket_bytes(self, gradients: float) -> float:
        """Return the bytes of buckets that are stored in addition to the gradients."""
        return 0

    def step_memory(self, work: Work, gradients: float) -> StepMemory:
        """Return the bytes of a rank during a step that depend on the strategy.

        Args:
            gradients: Bytes of the gradients that the rank stores.
        """
        n_blocks, is_first, _ = work.part
        stay, n_tensor = self.stores_gradients(work), self.dims.tensor
        table = work.shape.table / n_tensor * work.weight_bytes
        copies = self.bucket_bytes(gradients)
        if work.is_mixed and work.checkpointing != "full":
            copies += 2 * n_blocks * work.shape.block_matrices / n_tensor
        last = gradients + is_first * (1 + stay) * table + copies
        return StepMemory(copies, stay * gradients, 0.0, last)

    # Communication

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield what a rank sends in an optimizer step; entries of 0 bytes are dropped."""
        yield from ()


@dataclass(frozen=True)
class AveragingCosts(StrategyCosts[OptionsT]):
    """Copies of the model that average their gradients at the end of each step, by buckets."""

    @property
    def ddp_options(self) -> DDPOptions:
        """Options of DDP: the defaults, for a strategy that has no such options."""
        default = strategies.default_options("ddp")
        assert isinstance(default, DDPOptions)
        return default

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield one all-reduce of all gradients, overlapped with the last backward pass.

        A bucket waits for its last gradient, and the gradient of a tied table is the last of all.
        Pipelines average after all passes. PowerSGD sends full gradients in its first 1000 steps.
        """
        n, held, options = self.step_ranks, sum(work.held), self.ddp_options
        value_bytes = 2 if options.comm_hook in ("bf16", "fp16") else work.weight_bytes
        bucket = options.bucket_cap_mb * 2**20 / work.weight_bytes  # parameters
        last = max(bucket, work.shape.is_tied * work.shape.table)
        exposed = min(1.0, last / held) if self.dims.pipeline == 1 else 1.0
        sent, n_buckets = all_reduce_bytes(held * value_bytes, n), -(-held // bucket)
        room = 2 / 3 / work.accumulate
        yield Traffic("gradients", DATA, sent, n_buckets, 2 * (n - 1), exposed, room)


@dataclass(frozen=True)
class BucketCosts(AveragingCosts[OptionsT]):
    """Copies whose gradients stay in DDP's buckets between steps."""

    def stores_gradients(self, work: Work) -> bool:
        return super().stores_gradients(work) or self.step_ranks > 1


@dataclass(frozen=True)
class DDPCosts(BucketCosts[DDPOptions]):
    """`ddp`."""

    @property
    def ddp_options(self) -> DDPOptions:
        return self.options

    def bucket_bytes(self, gradients: float) -> float:
        return 0 if self.options.gradient_as_bucket_view else gradients


@dataclass(frozen=True)
class DiLoCoCosts(BucketCosts[DiLoCoOptions]):
    """`diloco`: replicas that exchange the change of their weights every `sync_every` steps."""

    @property
    def step_ranks(self) -> int:
        return self.dims.data // (self.options.replicas or self.dims.data)

    @property
    def extra_per_parameter(self) -> float:
        """The weights at the last synchronization, and the outer momentum."""
        return 2 if self.options.outer_momentum else 1

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield the gradients of a replica, and the change of the replicas' weights.

        The change is all-reduced every `sync_every` steps without overlap. Each rank of a replica
        all-reduces a part of the change, which it then broadcasts to the others.
        """
        yield from super().traffic(work)
        n, held, parts = self.dims.data // self.step_ranks, sum(work.held), self.step_ranks
        share = 1 / self.options.sync_every
        value_bytes = 2 if self.options.outer_dtype == "bf16" else work.weight_bytes
        calls = share * (work.shape.n_layers * len(work.shape.matrices) + 3)  # matrices; the rest
        sent = share * all_reduce_bytes(held * value_bytes, n) / parts
        yield Traffic("what replicas moved", DATA, sent, calls / parts, 2 * (n - 1))
        sent = share * gather_bytes(held * work.weight_bytes, parts)
        yield Traffic("what all moved", DATA, sent, calls, parts - 1)


@dataclass(frozen=True)
class ShardedCosts(StrategyCosts[ShardedOptions]):
    """`fsdp`: shards of weights, gradients and states over the data axis."""

    shards_weights = True

    @property
    def n_shards(self) -> int:
        return self.dims.data // self.dims.replicas

    def step_memory(self, work: Work, gradients: float) -> StepMemory:
        blocks, root = work.parameters()
        n_blocks, options = work.part[0], self.options
        gathered_share = min(1, 2 / n_blocks) if options.reshard_after_forward else 1
        copies = (root + gathered_share * blocks) * work.matmul_bytes
        early = self.stores_gradients(work) * gradients
        if work.accumulate > 1 and not options.accumulate_shards:
            early = (blocks + root) * work.weight_bytes
        # Full gradients in the type of the products, and again as they are sent.
        full_gradient = work.matmul_bytes + work.weight_bytes
        gloo_copy = work.is_cpu * work.weight_bytes
        last = max(early, gradients) + root * (full_gradient + gloo_copy)
        return StepMemory(copies, early, blocks / n_blocks * full_gradient, last)

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield the weights, gathered in every pass, and the gradients, reduce-scattered.

        Gradients are reduced in the last micro-step, with `accumulate_shards` in every micro-step.
        The root's weights stay from forward to backward, a block's only without resharding. Copies
        of the shards all-reduce their gradients.

        Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.
        """
        (blocks, root), copies, n_blocks = work.held, self.dims.replicas, work.part[0]
        n, total, weight_bytes = self.n_shards, blocks + root, work.weight_bytes
        passes = work.accumulate * (2 if self.options.reshard_after_forward else 1)
        gathered = passes * blocks + work.accumulate * root
        sent, calls = gather_bytes(gathered * work.matmul_bytes, n), passes * n_blocks + 1
        exposed = work.accumulate * root / gathered
        yield Traffic("weights", DATA, sent, calls, n - 1, exposed, 1.0)
        times = work.accumulate if self.options.accumulate_shards else 1
        sent, calls = times * gather_bytes(total * weight_bytes, n), times * (n_blocks + 1)
        yield Traffic("gradients", DATA, sent, calls, n - 1, root / total, 1.0)
        sent, hops = times * all_reduce_bytes(total / n * weight_bytes, copies), 2 * (copies - 1)
        yield Traffic("gradients of copies", DATA, sent, calls, hops, root / total, 1.0)


@dataclass(frozen=True)
class TensorParallelCosts(AveragingCosts[StrategyOptions]):
    """`tensor_parallel`: layers split over the tensor axis."""

    def traffic(self, work: Work) -> Iterator[Traffic]:
        yield from tensor_traffic(work)
        yield from super().traffic(work)


@dataclass(frozen=True)
class FSDPTensorParallelCosts(ShardedCosts):
    """`fsdp_tensor_parallel`: layers split over the tensor axis, inside of FSDP."""

    def traffic(self, work: Work) -> Iterator[Traffic]:
        yield from tensor_traffic(work)
        yield from super().traffic(work)


@dataclass(frozen=True)
class PipelineCosts(AveragingCosts[PipelineOptions]):
    """`pipeline` and `ddp_pipeline`: blocks divided into stages."""

    @property
    def stages_per_rank(self) -> int:
        return strategies.STAGES_PER_RANK[self.options.schedule]

    @property
    def microbatches(self) -> int:
        if self.dims.pipeline == 1:
            return 1
        return strategies.count_microbatches(self.options.microbatches, self.dims.pipeline)

    def live_microbatches(self, rank: int) -> float:
        """Return all microbatches under GPipe, and as many as warm the rank up under 1F1B."""
        if self.options.schedule == "gpipe":
            return self.microbatches
        n_ranks, n_stages = self.dims.pipeline, self.stages_per_rank
        alive = n_ranks - rank + (n_stages > 1) * (n_ranks - 1) / n_stages
        return min(self.microbatches, alive)

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield the activations for the next stage and their gradients for the previous stage.

        The two ends all-reduce the gradient of the weight that they share, once a step.
        """
        n, (_, is_first, is_last) = self.dims.pipeline, work.part
        boundaries = work.accumulate * (2 * self.stages_per_rank - is_first - is_last)
        row_bytes = work.shape.d_model * max(work.matmul_bytes, work.weight_bytes)
        sent = boundaries * work.tokens * row_bytes
        yield Traffic("passed on", PIPELINE, sent, boundaries)
        is_shared = n > 1 and work.shape.is_tied and (is_first or is_last)
        sent = all_reduce_bytes(is_shared * work.shape.table * work.weight_bytes, 2)
        yield Traffic("the tied gradient", PIPELINE, sent, 1, 2)
        yield from super().traffic(work)


def tensor_traffic(work: Work) -> Iterator[Traffic]:
    """Yield the activations that a tensor group exchanges: 4 L + 2 times forward, and backward.

    Recomputation repeats three of a block's four exchanges. In addition, three values per token are
    all-reduced for the loss, and once a step the gradients of the parameters that all ranks hold.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    shape, n, (n_blocks, is_first, is_last) = work.shape, work.dims.tensor, work.part
    padded = -(-work.seq_len // n) * n
    times = 2 * (4 * n_blocks + is_first + is_last) + 3 * n_blocks * (work.checkpointing != "none")
    times *= work.accumulate
    sent = times * gather_bytes(work.batch_size * padded * shape.d_model * work.matmul_bytes, n)
    yield Traffic("activations", TENSOR, sent, times * work.microbatches, n - 1)
    sent = is_last * work.accumulate * all_reduce_bytes(3 * 4 * work.tokens, n)  # fp32
    yield Traffic("loss", TENSOR, sent, work.accumulate, 2 * (n - 1))
    # The parameters that a rank holds of an endless tensor group are those that are not split.
    full = shape.parameters(n_blocks, is_first, is_last, 2**62)
    sent = all_reduce_bytes(full * work.weight_bytes * work.dims.replicas / work.dims.data, n)
    yield Traffic("gradients of norms", TENSOR, sent, 1, 2 * (n - 1))

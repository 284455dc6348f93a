"""Facts about strategies that the planner asks for: what a rank stores and what it sends.

The row of a strategy in `core.strategies.STRATEGIES` names its class here, or a class of another
package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from gptrain.core import strategies
from gptrain.core.strategies import (
    CONTEXT,
    DATA,
    PIPELINE,
    TENSOR,
    ContextParallelOptions,
    DDPOptions,
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
    """Bytes of a rank that exist only during an optimizer step and depend on the strategy.

    `costs.memory.estimate_memory` adds them to the tensors that all strategies have.

    Attributes:
        copies: Bytes of weights that FSDP has gathered or autograd keeps in 16 bits, and of DDP's
            buckets. They exist in the forward and in the backward pass.
        early: Bytes of gradients that are stored during a forward pass.
        in_block: Extra bytes during the backward pass of each block but the last: the gradients of
            the following block, which FSDP still sends.
        after_block: Extra bytes at the end of the backward pass of a block: its full gradients, and
            the copy of them that FSDP sends.
        last: Bytes of all gradients, and of the copies that still exist, when the gradient of the
            token table is added to them at the end of the backward pass.
    """

    copies: float
    early: float
    in_block: float
    after_block: float
    last: float


# Pipeline stages of a rank by schedule; published runs also have interleaved stages.
STAGES_PER_RANK = {"interleaved_1f1b": 2}


@dataclass(frozen=True)
class StrategyCosts(Generic[OptionsT]):
    """Memory and traffic of a strategy, for the planner.

    This base class describes a full copy of the net that sends nothing.

    Attributes:
        options: Options of the `strategy` group of the config.
        dims: Number of ranks along each axis.
    """

    options: OptionsT
    dims: ParallelDims

    # Division of the work

    @property
    def shards_weights(self) -> bool:
        """True if ranks store shards of the weights and gather them for each pass."""
        return False

    @property
    def step_ranks(self) -> int:
        """Number of ranks that average their gradients in each step."""
        return self.dims.gradient_ranks

    @property
    def n_shards(self) -> int:
        """Number of ranks over which FSDP shards weights, gradients and optimizer states."""
        return 1

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that one rank holds."""
        return 1

    @property
    def microbatches(self) -> int:
        """Number of microbatches into which a pipeline divides a micro-step; 1 without pipeline."""
        return 1

    # Memory

    @property
    def extra_per_parameter(self) -> float:
        """Values stored per parameter in addition to weight, gradient and optimizer state."""
        return 0

    def live_microbatches(self, rank: int) -> float:
        """Return for how many microbatches a rank of a pipeline holds activations at once.

        Args:
            rank: Index of the rank in its pipeline. Rank 0 holds the first stage.
        """
        return 1

    def stores_gradients(self, work: Work) -> bool:
        """Return whether the rank holds gradients while a forward pass runs.

        It does if a step has several micro-steps or microbatches, over which gradients are
        accumulated. A subclass may add other cases.

        Args:
            work: Facts about the rank's optimizer step.
        """
        return work.accumulate > 1 or self.microbatches > 1

    def bucket_bytes(self, gradients: float) -> float:
        """Return the bytes of DDP's buckets that are stored in addition to the gradients.

        The base class has no buckets.

        Args:
            gradients: Bytes of the gradients that the rank stores.
        """
        return 0

    def step_memory(self, work: Work, gradients: float) -> StepMemory:
        """Return the bytes of a rank during a step that depend on the strategy.

        Args:
            work: Facts about the rank's optimizer step.
            gradients: Bytes of the gradients that the rank stores.
        """
        n_blocks, is_first, _ = work.part
        n_tensor = self.dims.tensor
        copies = self.bucket_bytes(gradients)
        if work.is_mixed and work.checkpointing != "full":
            # The backward pass needs the 16-bit copies of the matrices that autocast made.
            copies += 2 * n_blocks * work.shape.block_matrices / n_tensor
        stores_gradients = self.stores_gradients(work)
        last = gradients
        if is_first:
            # The gradient of the token table is complete before it is added to the stored gradient.
            n_tables = 2 if stores_gradients else 1
            last += n_tables * (work.shape.table / n_tensor * work.weight_bytes)
        early = gradients if stores_gradients else 0.0
        return StepMemory(copies, early, 0.0, 0.0, last + copies)

    # Communication

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield what a rank sends in an optimizer step. The base class sends nothing.

        Entries of 0 bytes may be yielded; `find_traffic` leaves them out.

        Args:
            work: Facts about the rank's optimizer step.
        """
        yield from ()


@dataclass(frozen=True)
class AveragingCosts(StrategyCosts[OptionsT]):
    """Costs of copies of the model that average their gradients once per step, bucket by bucket."""

    @property
    def ddp_options(self) -> DDPOptions:
        """Options of DDP: the defaults, for a strategy that has no such options."""
        default = strategies.default_options("ddp")
        assert isinstance(default, DDPOptions)
        return default

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield one all-reduce of all gradients, overlapped with the last backward pass.

        A bucket waits for its last gradient, and the gradient of a tied table is the last of all.
        Pipelines and context groups average after all passes. PowerSGD sends full gradients in its
        first 1000 steps.

        Args:
            work: Facts about the rank's optimizer step.
        """
        n_ranks = self.step_ranks
        n_parameters = sum(work.held)
        options = self.ddp_options
        value_bytes = 2 if options.comm_hook in ("bf16", "fp16") else work.weight_bytes
        bucket = options.bucket_cap_mb * 2**20 / work.weight_bytes  # parameters per bucket
        n_buckets = -(-n_parameters // bucket)
        last_bucket = max(bucket, work.shape.table) if work.shape.is_tied else bucket
        averages_at_end = self.dims.pipeline > 1 or self.dims.context > 1
        exposed = 1.0 if averages_at_end else min(1.0, last_bucket / n_parameters)
        sent = all_reduce_bytes(n_parameters * value_bytes, n_ranks)
        overlap = 2 / 3 / work.accumulate  # the backward pass is two thirds of a micro-step
        yield Traffic("gradients", DATA, sent, n_buckets, 2 * (n_ranks - 1), exposed, overlap)


@dataclass(frozen=True)
class BucketCosts(AveragingCosts[OptionsT]):
    """Costs of copies of the model whose gradients stay in DDP's buckets between steps."""

    def stores_gradients(self, work: Work) -> bool:
        """Return whether the rank holds gradients while a forward pass runs.

        It does if gradients are accumulated over micro-steps or microbatches, and if several ranks
        average their gradients, because DDP's buckets stay allocated.

        Args:
            work: Facts about the rank's optimizer step.
        """
        return super().stores_gradients(work) or self.step_ranks > 1


@dataclass(frozen=True)
class DDPCosts(BucketCosts[DDPOptions]):
    """Costs of `ddp`: full copies whose gradients are averaged during the backward pass."""

    @property
    def ddp_options(self) -> DDPOptions:
        """Options of DDP, which are those of the strategy."""
        return self.options

    def bucket_bytes(self, gradients: float) -> float:
        """Return the bytes of the buckets. They are 0 if gradients are views of the buckets.

        Args:
            gradients: Bytes of the gradients that the rank stores.
        """
        return 0 if self.options.gradient_as_bucket_view else gradients


@dataclass(frozen=True)
class ShardedCosts(StrategyCosts[ShardedOptions]):
    """Costs of `fsdp`: shards of weights, gradients and optimizer states over the data axis."""

    @property
    def shards_weights(self) -> bool:
        """True: ranks store shards of the weights and gather them for each pass."""
        return True

    @property
    def n_shards(self) -> int:
        """Number of ranks that share one copy of the parameters."""
        return self.dims.gradient_ranks // self.dims.replicas

    def step_memory(self, work: Work, gradients: float) -> StepMemory:
        """Return the bytes of gathered weights and of gradients that exist only during a step.

        The gradients are the stored ones (shards, or full ones if they are accumulated unsharded),
        the full gradients of a block or of the layers outside of blocks, and the copies that FSDP
        sends.

        Args:
            work: Facts about the rank's optimizer step.
            gradients: Bytes of the gradients that the rank stores, which are shards.
        """
        blocks, root = work.held
        n_blocks = work.part[0]
        options = self.options
        # With resharding FSDP gathers a block while the block before it computes.
        gathered_share = min(1, 2 / n_blocks) if options.reshard_after_forward else 1
        copies = (root + gathered_share * blocks) * work.matmul_bytes
        early = gradients if self.stores_gradients(work) else 0.0
        if work.accumulate > 1 and not options.accumulate_shards:
            early = (blocks + root) * work.weight_bytes
        # Full gradients in the type of the matrix multiplications, and a copy that is sent.
        full_gradient = work.matmul_bytes + work.weight_bytes
        gloo_copy = work.weight_bytes if work.is_cpu else 0
        last = max(early, gradients) + root * (full_gradient + gloo_copy)
        in_block = blocks / n_blocks * work.weight_bytes if n_blocks > 1 else 0.0
        return StepMemory(copies, early, in_block, blocks / n_blocks * full_gradient, last)

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield the all-gathers of weights and the reduce-scatters of gradients in a step.

        Every micro-step gathers the weights outside of blocks once. It gathers the weights of each
        block once, or twice with `reshard_after_forward`: forward and backward. Gradients are
        reduced in the last micro-step, or in every micro-step with `accumulate_shards`. With
        several replicas the gradients of equal shards are then all-reduced.

        Args:
            work: Facts about the rank's optimizer step.

        Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.
        """
        blocks, root = work.held
        total = blocks + root
        n_blocks = work.part[0]
        n_shards = self.n_shards
        n_copies = self.dims.replicas

        gathers = work.accumulate * (2 if self.options.reshard_after_forward else 1)
        gathered = gathers * blocks + work.accumulate * root  # parameters
        sent = gather_bytes(gathered * work.matmul_bytes, n_shards)
        calls = gathers * n_blocks + 1
        exposed = work.accumulate * root / gathered
        yield Traffic("weights", DATA, sent, calls, n_shards - 1, exposed, 1.0)

        reductions = work.accumulate if self.options.accumulate_shards else 1
        calls = reductions * (n_blocks + 1)
        exposed = root / total
        sent = reductions * gather_bytes(total * work.weight_bytes, n_shards)
        yield Traffic("gradients", DATA, sent, calls, n_shards - 1, exposed, 1.0)

        shard_bytes = total / n_shards * work.weight_bytes
        sent = reductions * all_reduce_bytes(shard_bytes, n_copies)
        yield Traffic("gradients of copies", DATA, sent, calls, 2 * (n_copies - 1), exposed, 1.0)


@dataclass(frozen=True)
class TensorParallelCosts(AveragingCosts[StrategyOptions]):
    """Costs of `tensor_parallel`: layers that are split over the tensor axis."""

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield the traffic of the tensor group, and the averaging of gradients in the data group.

        Args:
            work: Facts about the rank's optimizer step.
        """
        yield from tensor_traffic(work)
        yield from super().traffic(work)


@dataclass(frozen=True)
class FSDPTensorParallelCosts(ShardedCosts):
    """Costs of `fsdp_tensor_parallel`: FSDP of layers that are split over the tensor axis."""

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield the traffic of the tensor group, and the all-gathers and reduce-scatters of FSDP.

        Args:
            work: Facts about the rank's optimizer step.
        """
        yield from tensor_traffic(work)
        yield from super().traffic(work)


@dataclass(frozen=True)
class ContextParallelCosts(StrategyCosts[ContextParallelOptions]):
    """Costs of `context_parallel`: parts of every sequence, and shards of the weights."""

    @property
    def weights(self) -> StrategyCosts:
        """Costs of the weights and their gradients: those of `fsdp`."""
        return ShardedCosts(self.options, self.dims)

    @property
    def shards_weights(self) -> bool:
        """True if ranks store shards of the weights and gather them for each pass."""
        return self.weights.shards_weights

    @property
    def n_shards(self) -> int:
        """Number of ranks that share one copy of the parameters."""
        return self.weights.n_shards

    def step_memory(self, work: Work, gradients: float) -> StepMemory:
        """Return the bytes of a rank during a step that depend on the sharding of the weights.

        Args:
            work: Facts about the rank's optimizer step.
            gradients: Bytes of the gradients that the rank stores.
        """
        return self.weights.step_memory(work, gradients)

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield the exchanges of attention, and the traffic of the weights and gradients.

        Each block exchanges q, k and v in one all-to-all and the output of attention in another.
        Their gradients take the same way back. Recomputation repeats the forward pass.

        Args:
            work: Facts about the rank's optimizer step.

        Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.2.
        """
        n_blocks = work.part[0]
        passes = work.accumulate * (2 if work.checkpointing == "none" else 3)
        row_bytes = 2 * (work.shape.d_q + work.kv_width) * work.matmul_bytes
        sent = gather_bytes(work.rank_tokens * row_bytes, self.dims.context)
        yield Traffic("heads", CONTEXT, passes * n_blocks * sent, 2 * passes * n_blocks)
        yield from self.weights.traffic(work)


@dataclass(frozen=True)
class PipelineCosts(AveragingCosts[PipelineOptions]):
    """Costs of `pipeline` and `ddp_pipeline`: blocks that are divided into stages."""

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that one rank holds under the schedule."""
        return STAGES_PER_RANK.get(self.options.schedule, 1)

    @property
    def microbatches(self) -> int:
        """Number of microbatches into which the pipeline divides a micro-step."""
        if self.dims.pipeline == 1:
            return 1
        return strategies.count_microbatches(self.options.microbatches, self.dims.pipeline)

    def live_microbatches(self, rank: int) -> float:
        """Return for how many microbatches a rank of the pipeline holds activations at once.

        GPipe holds all microbatches. 1F1B holds the microbatches whose forward passes the rank runs
        before its first backward pass.

        Args:
            rank: Index of the rank in its pipeline. Rank 0 holds the first stage and most
                microbatches.

        Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
        """
        if self.options.schedule == "gpipe":
            return self.microbatches
        n_ranks = self.dims.pipeline
        n_stages = self.stages_per_rank
        warm_up = float(n_ranks - rank)
        if n_stages > 1:
            warm_up += (n_ranks - 1) / n_stages
        return min(self.microbatches, warm_up)

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield what a rank sends to its neighbours, and the all-reduces of gradients.

        In every microbatch a stage sends activations to the next stage and their gradients to the
        previous one. Once a step, the first and the last rank of a pipeline all-reduce the gradient
        of a tied token table, and equal ranks of all pipelines average their gradients.

        Args:
            work: Facts about the rank's optimizer step.
        """
        _, is_first, is_last = work.part
        # A stage sends to its neighbours on both sides. The first and the last stage have one.
        n_missing = (1 if is_first else 0) + (1 if is_last else 0)
        boundaries = work.accumulate * (2 * self.stages_per_rank - n_missing)
        row_bytes = work.shape.d_model * max(work.matmul_bytes, work.weight_bytes)
        sent = boundaries * work.tokens * row_bytes
        yield Traffic("activations", PIPELINE, sent, boundaries)
        if self.dims.pipeline > 1 and work.shape.is_tied and (is_first or is_last):
            sent = all_reduce_bytes(work.shape.table * work.weight_bytes, 2)
            yield Traffic("gradient of the tied weight", PIPELINE, sent, 1, 2)
        yield from super().traffic(work)


def tensor_traffic(work: Work) -> Iterator[Traffic]:
    """Yield the traffic of a tensor group.

    The group gathers or reduce-scatters the activations (tokens, d_model) 4 L + 2 times in the
    forward pass of L layers, and as often in the backward pass. Recomputation repeats three of a
    block's four exchanges. In addition, three fp32 values per token are all-reduced for the loss,
    and the gradients of the parameters that all ranks hold are all-reduced once per step.

    Args:
        work: Facts about the rank's optimizer step.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    n_ranks = work.dims.tensor
    n_blocks, is_first, is_last = work.part
    n_ends = (1 if is_first else 0) + (1 if is_last else 0)
    exchanges = 2 * (4 * n_blocks + n_ends)
    if work.checkpointing != "none":
        exchanges += 3 * n_blocks
    exchanges *= work.accumulate
    padded_seq_len = -(-work.seq_len // n_ranks) * n_ranks
    exchange_bytes = work.batch_size * padded_seq_len * work.shape.d_model * work.matmul_bytes
    sent = exchanges * gather_bytes(exchange_bytes, n_ranks)
    yield Traffic("activations", TENSOR, sent, exchanges * work.microbatches, n_ranks - 1)
    if is_last:
        sent = work.accumulate * all_reduce_bytes(3 * 4 * work.tokens, n_ranks)
        yield Traffic("loss", TENSOR, sent, work.accumulate, 2 * (n_ranks - 1))
    # In an infinitely large tensor group a rank holds only the parameters that are not split.
    unsplit = work.shape.parameters(n_blocks, is_first, is_last, n_tensor=2**62)
    unsplit_bytes = unsplit * work.weight_bytes * work.dims.replicas / work.dims.data
    sent = all_reduce_bytes(unsplit_bytes, n_ranks)
    yield Traffic("gradients of norms", TENSOR, sent, 1, 2 * (n_ranks - 1))

"""The work of one rank in an optimizer step, from which all estimates of the planner follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from gptrain.core import strategies
from gptrain.core.precision import TYPE_BYTES, find_precision
from gptrain.core.schema import RunConfig
from gptrain.core.strategies import STRATEGIES, ParallelDims, StrategyOptions, strategy_name
from gptrain.costs.optimizers import ADAM, OptimizerFacts, facts_of
from gptrain.costs.shape import DecoderShape, find_shape
from gptrain.costs.strategies import StrategyCosts


@dataclass(frozen=True)
class Work:
    """Facts about an optimizer step of one rank, from which the planner computes all estimates.

    Attributes:
        shape: Sizes of the net.
        options: The `strategy` group.
        dims: Number of ranks along each axis of the device mesh.
        batch_size: Sequences per data rank and micro-step.
        seq_len: Tokens per sequence.
        accumulate: Micro-steps per optimizer step.
        precision: Precision as Lightning names it, such as "bf16-mixed".
        optimizer: Facts about the optimizer: its state, computation and traffic.
        checkpointing: "none", "selective" or "full", the activations that a block recomputes.
        dropout: Probability of dropout.
        compile: "none", "blocks" or "model", the parts of the net that are compiled.
        is_cpu: True if the ranks compute on CPUs and communicate by gloo.
        has_bf16: True if the device has bf16 instructions. Without them Muon uses fp32.
        rank: Index of the rank in its pipeline.
    """

    shape: DecoderShape
    options: StrategyOptions
    dims: ParallelDims
    batch_size: int
    seq_len: int
    accumulate: int = 1
    precision: str = "32-true"
    optimizer: OptimizerFacts = ADAM
    checkpointing: str = "none"
    dropout: float = 0.0
    compile: str = "none"
    is_cpu: bool = False
    has_bf16: bool = True
    rank: int = 0

    @property
    def costs(self) -> StrategyCosts:
        """Facts about the strategy: its memory and traffic. Each access makes a new object."""
        name = strategy_name(self.options.name, self.dims.world_size)
        costs_class = resolve_name(STRATEGIES[name].costs)
        return costs_class(self.options, self.dims)

    @property
    def weight_bytes(self) -> int:
        """Bytes per parameter. Mixed precision keeps fp32 weights."""
        return TYPE_BYTES[find_precision(self.precision).weights]

    @property
    def is_mixed(self) -> bool:
        """True in mixed precision: matrices multiply 16-bit copies of fp32 weights."""
        return find_precision(self.precision).autocast is not None

    @property
    def is_cast(self) -> bool:
        """True if autocast casts the inputs of each matrix multiplication to 16 bits.

        It is True in mixed precision without FSDP. Under FSDP it is False: FSDP gathers 16-bit
        weights, so that activations have 16 bits everywhere and no cast is needed.
        """
        return self.is_mixed and not self.costs.shards_weights

    @property
    def row_bytes(self) -> int:
        """Bytes per element of the residual stream."""
        has_16_bit_activations = self.is_mixed and not self.is_cast
        return self.matmul_bytes if has_16_bit_activations else self.weight_bytes

    @property
    def matmul_bytes(self) -> int:
        """Bytes per element of the inputs of a matrix multiplication."""
        return TYPE_BYTES[find_precision(self.precision).matmul]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step on one data rank."""
        return self.batch_size * self.seq_len

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-step on one rank. A context group divides and pads every sequence."""
        return self.batch_size * -(-self.seq_len // self.dims.context)

    @property
    def kv_width(self) -> int:
        """Width of a token's keys in attention. A context group repeats heads for its ranks."""
        n_ranks = self.dims.context
        return self.shape.d_kv * (n_ranks // math.gcd(self.shape.n_kv_heads, n_ranks))

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step on all ranks together."""
        return self.tokens * self.accumulate * self.dims.data

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a micro-step in a pipeline. 1 without a pipeline."""
        return self.costs.microbatches

    @property
    def part(self) -> tuple[int, bool, bool]:
        """Number of blocks of the rank, whether it has the first stage, whether it has the last."""
        n_stages = self.dims.pipeline * self.costs.stages_per_rank
        stages = range(self.rank, n_stages, self.dims.pipeline)
        blocks = (strategies.stage_blocks(stage, n_stages, self.shape.n_layers) for stage in stages)
        return sum(map(len, blocks)), 0 in stages, n_stages - 1 in stages

    @property
    def ends(self) -> list[Work]:
        """The same step on the first and on the last rank of the pipeline, or one without pipeline.

        These two ranks have the most work: the embedding, or the head and the loss.
        """
        return [replace(self, rank=rank) for rank in {0, self.dims.pipeline - 1}]

    @property
    def held(self) -> tuple[float, float]:
        """Number of the rank's parameters in blocks, and of those outside, before FSDP shards them.

        Both numbers include the padding by which FSDP makes all shards of a tensor equally large.
        """
        n_shards = self.costs.n_shards
        blocks, root = self.parameters(n_shards)
        return n_shards * blocks, n_shards * root

    def parameters(self, n_shards: int = 1) -> tuple[float, float]:
        """Return the number of parameters of the rank's blocks, and of those outside of blocks.

        Args:
            n_shards: Number of FSDP shards of each tensor. The result is that of the first shard.
        """
        n_blocks, is_first, is_last = self.part
        blocks = self.shape.parameters(n_blocks, False, False, self.dims.tensor, n_shards)
        root = self.shape.parameters(0, is_first, is_last, self.dims.tensor, n_shards)
        return blocks, root


def find_work(
    run: RunConfig, sample_tokens: int | None, name: str, world_size: int, is_cpu: bool
) -> Work | None:
    """Describe an optimizer step of a run under a strategy, for the planner.

    Returns None if there are no formulas for the net, or if `sample_tokens` is None.

    Args:
        run: Configuration of the run.
        sample_tokens: Tokens per sample. None if the config does not determine this number.
        name: Name of the strategy. Options that the run does not set have their defaults.
        world_size: Number of ranks.
        is_cpu: True if the ranks compute on CPUs.

    Raises:
        ValueError: If the run cannot be divided over the ranks: the sizes of the axes do not
            multiply to the world size; the tensor or the context axis does not divide the heads;
            the batch cannot be divided over the data ranks or the microbatches; the copies of the
            net do not divide the data axis; or there are more pipeline stages than blocks. Also if
            both the global batch size and an accumulation are set.
    """
    model = run.model
    optimizer = run.optimizer
    shape = find_shape(model)
    if shape is None or sample_tokens is None:
        return None
    nodes = run.trainer.num_nodes
    n_nodes = nodes if isinstance(nodes, int) else 1  # "auto" is one node for the planner
    options = strategies.options_for(name, run.strategy)
    ranks = strategies.parallel_dims(options, world_size, n_nodes)
    batch = run.batch_plan(ranks.data)
    work = Work(
        shape,
        options,
        ranks,
        batch.batch_size,
        sample_tokens,
        batch.accumulate,
        precision=str(run.trainer.precision),
        optimizer=facts_of(optimizer.target, optimizer.arguments),
        checkpointing=model.activation_checkpointing,
        dropout=model.arguments.get("dropout") or 0.0,
        compile=model.compile,
        is_cpu=is_cpu,
    )
    is_even = (
        shape.n_kv_heads % ranks.tensor == 0
        and shape.n_heads % ranks.context == 0
        and batch.batch_size % work.microbatches == 0
        and ranks.data % ranks.replicas == 0
    )
    if not is_even or ranks.pipeline * work.costs.stages_per_rank > shape.n_layers:
        message = "does not divide the heads, layers, batch or copies of the model"
        raise ValueError(f"{ranks}: {message}")
    return work

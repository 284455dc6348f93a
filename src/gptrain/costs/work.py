"""What a rank does in an optimizer step: the facts that every estimate of the planner reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pkgutil import resolve_name

from gptrain.core import strategies
from gptrain.core.lengths import plan_batch
from gptrain.core.schema import RunConfig, SimpleGPTConfig
from gptrain.core.strategies import STRATEGIES, ParallelDims, StrategyOptions, strategy_name
from gptrain.costs.optimizers import ADAM, OptimizerFacts, facts_of
from gptrain.costs.shape import DecoderShape, find_shape
from gptrain.costs.strategies import StrategyCosts


@dataclass(frozen=True)
class Work:
    """A step of one rank; names and values as in the config.

    Attributes:
        options: The `strategy` group.
        batch_size: Sequences per data rank and micro-step.
        optimizer: What the optimizer stores, computes and sends.
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
        """What the strategy stores and sends."""
        row = STRATEGIES[strategy_name(self.options.name, self.dims.world_size)]
        return resolve_name(row.costs)(self.options, self.dims)

    @property
    def weight_bytes(self) -> int:
        """Of a parameter; mixed precision keeps fp32 weights."""
        return {"bf16-true": 2, "16-true": 2, "64-true": 8, "64": 8}.get(self.precision, 4)

    @property
    def is_mixed(self) -> bool:
        """Products are taken of 16-bit copies."""
        return self.weight_bytes == 4 and "16" in self.precision

    @property
    def is_cast(self) -> bool:
        """Each product casts its inputs. FSDP gathers 16-bit weights, so activations are 16-bit."""
        return self.is_mixed and not self.costs.shards_weights

    @property
    def row_bytes(self) -> int:
        """Of a number in the residual stream."""
        return self.product_bytes if self.is_mixed and not self.is_cast else self.weight_bytes

    @property
    def product_bytes(self) -> int:
        """Of a number that a matrix multiplies."""
        return 2 if self.is_mixed else self.weight_bytes

    @property
    def tokens(self) -> int:
        """Positions of a micro-step on one rank."""
        return self.batch_size * self.seq_len

    @property
    def step_tokens(self) -> int:
        """Positions of a step, over all ranks."""
        return self.tokens * self.accumulate * self.dims.data

    @property
    def microbatches(self) -> int:
        """Parts of a micro-step that follow each other through a pipeline; 1 without a pipeline."""
        return self.costs.microbatches

    @property
    def part(self) -> tuple[int, bool, bool]:
        """Blocks that the rank holds, and whether the first and the last stage are its own."""
        n_stages = self.dims.pipeline * self.costs.stages_per_rank
        stages = range(self.rank, n_stages, self.dims.pipeline)
        blocks = (strategies.stage_blocks(stage, n_stages, self.shape.n_layers) for stage in stages)
        return sum(map(len, blocks)), 0 in stages, n_stages - 1 in stages

    @property
    def ends(self) -> list[Work]:
        """The same step of the first and of the last rank of a pipeline, which have most to do."""
        return [replace(self, rank=rank) for rank in {0, self.dims.pipeline - 1}]

    @property
    def held(self) -> tuple[float, float]:
        """Parameters of its blocks, and of what is around them, before FSDP shards them.

        With what fills each tensor up to as many rows for every rank.
        """
        n_shards = self.costs.n_shards
        blocks, root = self.parameters(n_shards)
        return n_shards * blocks, n_shards * root

    def parameters(self, n_shards: int = 1) -> tuple[float, float]:
        """Those of its blocks and of what is around them, of the first of so many shards."""
        n_blocks, is_first, is_last = self.part
        blocks = self.shape.parameters(n_blocks, False, False, self.dims.tensor, n_shards)
        root = self.shape.parameters(0, is_first, is_last, self.dims.tensor, n_shards)
        return blocks, root


def find_work(
    run: RunConfig, sample_tokens: int | None, name: str, world_size: int, is_cpu: bool
) -> Work | None:
    """Return the step of a run under a strategy, or None if the shape of its net is not known.

    Args:
        sample_tokens: Positions of a sample. None if the data do not say it.
        name: Name of the strategy. Options that the run does not give have their defaults.

    Raises:
        ValueError: If sizes do not divide.
    """
    model, optimizer = run.model, run.optimizer
    if (shape := find_shape(model)) is None or sample_tokens is None:
        return None
    nodes = run.trainer.num_nodes
    n_nodes = nodes if isinstance(nodes, int) else 1
    options = strategies.options_for(name, run.strategy).on_ranks(n_nodes, world_size)
    ranks = strategies.parallel_dims(options, world_size)
    accumulate, total = run.trainer.accumulate_grad_batches, run.data.global_batch_size
    batch = plan_batch(run.data.batch_size, total, accumulate, ranks.data)
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
        dropout=model.dropout if isinstance(model, SimpleGPTConfig) else 0.0,
        compile=model.compile,
        is_cpu=is_cpu,
    )
    uneven = shape.n_kv_heads % ranks.tensor or batch.batch_size % work.microbatches
    uneven = uneven or ranks.data % ranks.replicas
    if uneven or ranks.pipeline * work.costs.stages_per_rank > shape.n_layers:
        raise ValueError(f"{ranks}: does not divide heads, layers, batch or copies")
    return work

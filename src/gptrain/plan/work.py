"""What a rank does in an optimizer step: the facts that every estimate of the planner reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gptrain.plan.batch import plan_batch
from gptrain.plan.dims import (
    STAGES_PER_RANK,
    ParallelDims,
    count_microbatches,
    parallel_dims,
    stage_blocks,
)
from gptrain.plan.shape import DecoderShape, find_shape


@dataclass(frozen=True)
class Work:
    """A step of one rank; names and values as in the config.

    Attributes:
        batch_size: sequences per data rank and micro-step.
        options: the `strategy` group.   momentum: SGD's.
        rank: its place in the pipeline.
    """

    shape: DecoderShape
    strategy: str
    dims: ParallelDims
    batch_size: int
    seq_len: int
    accumulate: int = 1
    precision: str = "32-true"
    optimizer: str = "torch.optim.AdamW"
    momentum: float = 0.0
    checkpointing: str = "none"
    dropout: float = 0.0
    compile: str = "none"
    is_cpu: bool = False
    rank: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        """Of a parameter; mixed precision keeps fp32 weights."""
        return {"bf16-true": 2, "16-true": 2, "64-true": 8, "64": 8}.get(self.precision, 4)

    @property
    def is_mixed(self) -> bool:
        """Products are taken of 16-bit copies."""
        return self.weight_bytes == 4 and "16" in self.precision

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
    def stages_per_rank(self) -> int:
        return STAGES_PER_RANK.get(self.options.get("schedule", ""), 1)

    @property
    def microbatches(self) -> int:
        """Parts of a micro-step that follow each other through a pipeline; 1 without one."""
        n_ranks = self.dims.pipeline
        return count_microbatches(self.options.get("microbatches"), n_ranks) if n_ranks > 1 else 1

    @property
    def part(self) -> tuple[int, bool, bool]:
        """Blocks that the rank holds, and whether the first and the last stage are its own."""
        n_stages = self.dims.pipeline * self.stages_per_rank
        stages = range(self.rank, n_stages, self.dims.pipeline)
        blocks = (stage_blocks(stage, n_stages, self.shape.n_layers) for stage in stages)
        return sum(map(len, blocks)), 0 in stages, n_stages - 1 in stages

    @property
    def held(self) -> tuple[float, float]:
        """Parameters of its blocks, and of what is around them, before FSDP shards them."""
        n_blocks, *ends = self.part
        tensor, shape = self.dims.tensor, self.shape
        return shape.parameters(n_blocks, False, False, tensor), shape.parameters(0, *ends, tensor)


def find_work(
    config: Mapping[str, Any], name: str, options: Mapping[str, Any], world_size: int, is_cpu: bool
) -> Work | None:
    """The step of a checked config, as plain values, under a strategy; None without a shape.

    Raises: ValueError where sizes do not divide.
    """
    model, data, trainer = config["model"], config["data"], config["trainer"]
    if (shape := find_shape(model)) is None or not isinstance(data.get("seq_len"), int):
        return None
    dims = parallel_dims({**options, "name": name}, world_size)
    accumulate, total = trainer["accumulate_grad_batches"], data["global_batch_size"]
    batch = plan_batch(data["batch_size"], total, accumulate, dims.data)
    seq_len = data["seq_len"] - ("num_samples" in data)  # the last of dummy text is a target
    work = Work(
        shape, name, dims, batch.batch_size, seq_len, batch.accumulate, str(trainer["precision"]),
        config["optimizer"]["_target_"], config["optimizer"].get("momentum") or 0.0,
        model["activation_checkpointing"], model.get("dropout", 0.0), model["compile"], is_cpu,
        options=options,
    )  # fmt: skip
    sizes = [(shape.n_kv_heads, dims.tensor), (batch.batch_size, work.microbatches)]
    n_stages = dims.pipeline * work.stages_per_rank
    if any(number % size for number, size in sizes) or n_stages > shape.n_layers:
        raise ValueError(f"{dims}: does not divide heads, layers or batch")
    return work

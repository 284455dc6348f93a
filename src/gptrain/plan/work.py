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

WEIGHT_BYTES = {"bf16-true": 2, "16-true": 2, "64-true": 8, "64": 8}  # else fp32


@dataclass(frozen=True)
class Work:
    """A step of one rank.

    Attributes:
        batch_size: sequences per data rank and micro-step.
        precision: Lightning's name.   optimizer: its `_target_`.   momentum: SGD's.
        options: the `strategy` group.
        is_cpu: kernels and chunks of the loss differ there.
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
        return WEIGHT_BYTES.get(self.precision, 4)

    @property
    def is_mixed(self) -> bool:
        """Products are taken of 16-bit copies."""
        return self.weight_bytes == 4 and "16" in self.precision

    @property
    def product_bytes(self) -> int:
        """Of a number that a matrix multiplies."""
        return 2 if self.is_mixed else self.weight_bytes

    @property
    def product_type(self) -> str:
        """torch's name of such a number's type."""
        half = "bfloat16" if "bf16" in self.precision else "float16"
        return half if self.product_bytes == 2 else "float32"

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

    def held(self, *, blocks: bool = True, root: bool = True) -> float:
        """Parameters of the rank before FSDP shards them: of its blocks, of what is around them."""
        n_blocks, is_first, is_last = self.part
        return self.shape.parameters(
            n_blocks * blocks,
            is_first=is_first and root,
            is_last=is_last and root,
            n_tensor=self.dims.tensor,
        )


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
    work = Work(
        shape=shape,
        strategy=name,
        dims=dims,
        batch_size=batch.batch_size,
        seq_len=data["seq_len"] - ("num_samples" in data),  # the last of dummy text is a target
        accumulate=batch.accumulate,
        precision=str(trainer["precision"]),
        optimizer=config["optimizer"]["_target_"],
        momentum=config["optimizer"].get("momentum") or 0.0,
        checkpointing=model["activation_checkpointing"],
        dropout=model.get("dropout", 0.0),
        compile=model["compile"],
        is_cpu=is_cpu,
        options=options,
    )
    divides = shape.n_heads % dims.tensor == shape.n_kv_heads % dims.tensor == 0
    if not divides or dims.pipeline * work.stages_per_rank > shape.n_layers:
        raise ValueError(f"{dims}: does not divide heads or layers")
    if batch.batch_size % work.microbatches:
        raise ValueError(f"{work.microbatches} microbatches: do not divide data.batch_size")
    return work

"""What a rank does in an optimizer step: the facts that every estimate of the planner reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gptrain.costs.shape import DecoderShape, find_shape
from gptrain.lengths import plan_batch
from gptrain.parallel import dims


@dataclass(frozen=True)
class Work:
    """A step of one rank; names and values as in the config.

    Attributes:
        batch_size: sequences per data rank and micro-step.
        options: the `strategy` group.   momentum: SGD's.
        has_bf16: the device has instructions for it; without, Muon computes and sends fp32.
        rank: its place in the pipeline.
    """

    shape: DecoderShape
    strategy: str
    dims: dims.ParallelDims
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
    has_bf16: bool = True
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
    def has_fsdp(self) -> bool:
        return "fsdp" in self.strategy

    @property
    def n_shards(self) -> int:
        """Ranks over which FSDP shards; 1 without it."""
        return self.dims.data // self.dims.replicas if self.has_fsdp else 1

    @property
    def is_cast(self) -> bool:
        """Each product casts its inputs. FSDP gathers 16-bit weights, so activations are 16-bit."""
        return self.is_mixed and not self.has_fsdp

    @property
    def row_bytes(self) -> int:
        """Of a number in the residual stream."""
        return self.product_bytes if self.is_mixed and not self.is_cast else self.weight_bytes

    @property
    def product_bytes(self) -> int:
        """Of a number that a matrix multiplies."""
        return 2 if self.is_mixed else self.weight_bytes

    @property
    def is_muon(self) -> bool:
        return self.optimizer.endswith(".Muon")

    @property
    def tokens(self) -> int:
        """Positions of a micro-step on one rank."""
        return self.batch_size * self.seq_len

    @property
    def step_tokens(self) -> int:
        """Positions of a step, over all ranks."""
        return self.tokens * self.accumulate * self.dims.data

    @property
    def step_ranks(self) -> int:
        """Data ranks that average gradients in each step: all of them; of diloco one replica's."""
        n_replicas = self.options.get("replicas") or self.dims.data
        return self.dims.data // n_replicas if self.strategy == "diloco" else self.dims.data

    @property
    def muon_ranks(self) -> int:
        """Ranks that divide the updates of the hidden matrices of this rank's blocks.

        Under FSDP these are all ranks of the mesh, so that copies of the shards divide them, too.
        """
        if self.has_fsdp:
            return self.dims.tensor * self.dims.data
        return self.dims.tensor if self.dims.tensor > 1 else self.step_ranks

    @property
    def stages_per_rank(self) -> int:
        return dims.STAGES_PER_RANK.get(self.options.get("schedule", ""), 1)

    @property
    def microbatches(self) -> int:
        """Parts of a micro-step that follow each other through a pipeline; 1 without one."""
        n_ranks, given = self.dims.pipeline, self.options.get("microbatches")
        return dims.count_microbatches(given, n_ranks) if n_ranks > 1 else 1

    @property
    def part(self) -> tuple[int, bool, bool]:
        """Blocks that the rank holds, and whether the first and the last stage are its own."""
        n_stages = self.dims.pipeline * self.stages_per_rank
        stages = range(self.rank, n_stages, self.dims.pipeline)
        blocks = (dims.stage_blocks(stage, n_stages, self.shape.n_layers) for stage in stages)
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
        blocks, root = self.parameters(self.n_shards)
        return self.n_shards * blocks, self.n_shards * root

    def parameters(self, n_shards: int = 1) -> tuple[float, float]:
        """Those of its blocks and of what is around them, of the first of so many shards."""
        n_blocks, is_first, is_last = self.part
        blocks = self.shape.parameters(n_blocks, False, False, self.dims.tensor, n_shards)
        root = self.shape.parameters(0, is_first, is_last, self.dims.tensor, n_shards)
        return blocks, root


def find_work(
    config: Mapping[str, Any], sample_tokens: int | None, name: str, world_size: int, is_cpu: bool
) -> Work | None:
    """The step of a checked config, as plain values, under a strategy; None without a shape.

    Args:
        sample_tokens: positions of a sample; None where the data do not say.

    Raises: ValueError where sizes do not divide.
    """
    model, data, trainer, optimizer = (config[k] for k in ("model", "data", "trainer", "optimizer"))
    if (shape := find_shape(model)) is None or sample_tokens is None:
        return None
    options = config["strategy"] | {"name": name}
    if name == "diloco":
        nodes = trainer["num_nodes"]
        nodes = nodes if isinstance(nodes, int) else 1
        options["replicas"] = dims.count_replicas(options.get("replicas"), nodes, world_size)
    ranks = dims.parallel_dims(options, world_size)
    accumulate, total = trainer["accumulate_grad_batches"], data["global_batch_size"]
    batch = plan_batch(data["batch_size"], total, accumulate, ranks.data)
    work = Work(
        shape, name, ranks, batch.batch_size, sample_tokens, batch.accumulate,
        str(trainer["precision"]), optimizer["_target_"], optimizer.get("momentum") or 0.0,
        model["activation_checkpointing"], model.get("dropout", 0.0), model["compile"], is_cpu,
        options=options,
    )  # fmt: skip
    uneven = shape.n_kv_heads % ranks.tensor or batch.batch_size % work.microbatches
    uneven = uneven or ranks.data % ranks.replicas
    if uneven or ranks.pipeline * work.stages_per_rank > shape.n_layers:
        raise ValueError(f"{ranks}: does not divide heads, layers, batch or copies")
    return work

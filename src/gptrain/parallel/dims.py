"""The strategies, and how many ranks each of their axes has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DATA, TENSOR, PIPELINE = "data", "tensor", "pipeline"


@dataclass(frozen=True)
class Strategy:
    """One row of the table of strategies.

    Attributes:
        axes: over which the work is divided.
        needs: attributes that a net must have (`gptrain.models`).
        made: `module:class` of the object that partitions and trains the net (`whole.Whole`).
        check: `module:function` that raises Unfit for (net, options, dims) that do not go together.
        is_exact: it trains what one process trains, to rounding.
        contract: What it asks of the code of a net, for the message where a net breaks it.
    """

    axes: tuple[str, ...]
    needs: tuple[str, ...]
    made: str
    check: str = ""
    is_exact: bool = True
    contract: str = "forward(tokens) must equal head(hidden(tokens)) where a net has both"


_HERE = "gptrain.parallel"
_PIPELINE: dict[str, Any] = {
    "made": f"{_HERE}.pipeline:Pipeline",
    "check": f"{_HERE}.pipeline:check_pipeline",
    "contract": "a pipeline needs forward(tokens) == head(norm(blocks(embed(tokens)))), each block "
    "called with the activations alone",
}
_TENSOR: dict[str, Any] = {
    "made": f"{_HERE}.sharded:TensorParallel",
    "check": f"{_HERE}.tensor:check_tensor_parallel",
    "contract": "tensor parallelism needs head counts that are read off the width of q, k and v, "
    "each a layer of its own, in tensor_plan every parameter that works on a slice of the "
    "sequence, and forward(tokens) == head(hidden(tokens))",
}
_STAGES = ("embed", "blocks", "norm", "head")
_HEADS = ("tensor_plan", "n_heads", "head")
# To remove a strategy: its row here, its conf/strategy/*.yaml, its class.
STRATEGIES = {
    "single": Strategy((), (), f"{_HERE}.whole:Whole"),
    "ddp": Strategy((DATA,), (), f"{_HERE}.ddp:Replicated"),
    "fsdp": Strategy((DATA,), ("blocks",), f"{_HERE}.sharded:Sharded"),
    "tensor_parallel": Strategy((TENSOR,), _HEADS, **_TENSOR),
    "fsdp_tensor_parallel": Strategy((DATA, TENSOR), ("blocks", *_HEADS), **_TENSOR),
    "pipeline": Strategy((PIPELINE,), _STAGES, **_PIPELINE),
    "ddp_pipeline": Strategy((DATA, PIPELINE), _STAGES, **_PIPELINE),
    "diloco": Strategy((DATA,), (), f"{_HERE}.diloco:DiLoCo", is_exact=False),
}
ANY_NET = tuple(name for name, row in STRATEGIES.items() if not row.needs)
# Stages of a pipeline that one rank holds, by `strategy.schedule`.
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis; their product is the world size.

    Attributes:
        replicas: of the sharded net along the data axis, which it divides; 1: each rank of the
            axis holds another part.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline


def strategy_name(asked: str, world_size: int) -> str:
    """The row of the table that `strategy.name` means on so many ranks."""
    if asked == "auto":
        return "single" if world_size == 1 else "ddp"
    return asked


def parallel_dims(options: Mapping[str, Any], world_size: int) -> ParallelDims:
    """Ranks along each axis of a strategy on so many devices.

    What is left of the world after tensor and pipeline is data parallel. A size that is not given
    takes the whole world where that is the only axis, and 2 beside data parallelism.

    Args:
        options: the `strategy` group of a config that has been checked by itself.

    Raises: ValueError with the equation if the sizes do not multiply to the world size.
    """
    name = strategy_name(options["name"], world_size)
    axes = STRATEGIES[name].axes
    rest = 2 if DATA in axes else world_size
    tensor, pipeline = (
        (options.get(f"{axis}_parallel_size") or rest) if axis in axes else 1
        for axis in (TENSOR, PIPELINE)
    )
    n_data = max(1, world_size // (tensor * pipeline)) if DATA in axes else 1
    dims = ParallelDims(n_data, tensor, pipeline, options.get("replicas") or 1)
    if dims.world_size != world_size:
        equation = f"data {n_data} x tensor {tensor} x pipeline {pipeline} = {dims.world_size}"
        raise ValueError(
            f"strategy={name}: {equation}, but there are {world_size} ranks; "
            f"{_advice(axes, world_size)}"
        )
    return dims


def count_replicas(given: int | None, n_nodes: int, world_size: int) -> int:
    """Replicas of diloco: as given, or one per node where there are several, or one per rank."""
    return given or (n_nodes if n_nodes > 1 else world_size)


def count_microbatches(given: int | None, n_ranks: int) -> int:
    """Into how many parts a pipeline divides a batch: as given, or two per rank."""
    return given or 2 * n_ranks


def stage_blocks(stage: int, n_stages: int, n_blocks: int) -> range:
    """Blocks of a stage, in order; where they do not divide, early stages hold one more.

    The last also computes the head, which costs more than the embedding.
    """
    return range(*(-(-n_blocks * i // n_stages) for i in (stage, stage + 1)))


def _advice(axes: tuple[str, ...], world_size: int) -> str:
    if not axes:
        return "use one device, or strategy=ddp"
    axis = TENSOR if TENSOR in axes else PIPELINE
    if DATA not in axes:
        return f"use {axis}_parallel_size={world_size}, or null"
    divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
    return f"{axis}_parallel_size must divide {world_size}: {divisors}"

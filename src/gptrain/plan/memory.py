"""Bytes of weights, gradients and optimizer state that a rank holds, by strategy."""

from __future__ import annotations

from gptrain.plan.dims import ParallelDims
from gptrain.plan.shape import GPTShape

# fp32 weight, fp32 gradient, and Adam's two fp32 moments. Mixed precision by autocast keeps all
# four: its 16-bit copies live as long as one operation.
ADAM_BYTES_PER_PARAMETER = 4 + 4 + 2 * 4


def rank_parameters(
    name: str,
    shape: GPTShape,
    split: ParallelDims,
    *,
    pipeline_rank: int = 0,
    stages_per_rank: int = 1,
) -> float:
    """Parameters that one rank holds under a strategy.

    Exact where sizes divide; else off by less than a row of a matrix per parameter. Uneven stages:
    ask for the largest, rank 0 or the last.
    """
    if "pipeline" in name:
        n_stages = split.pipeline * stages_per_rank
        return shape.stage_parameters(range(pipeline_rank, n_stages, split.pipeline), n_stages)
    held = sum(shape.tensor_parallel_parameters(split.tensor))
    return held / split.data if "fsdp" in name else held


def state_bytes(
    name: str,
    shape: GPTShape,
    split: ParallelDims,
    *,
    pipeline_rank: int = 0,
    stages_per_rank: int = 1,
) -> float:
    """Bytes of weights, gradients and Adam's moments on one rank, in fp32."""
    held = rank_parameters(
        name, shape, split, pipeline_rank=pipeline_rank, stages_per_rank=stages_per_rank
    )
    return held * ADAM_BYTES_PER_PARAMETER

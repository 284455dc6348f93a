"""What a run will cost: batch arithmetic, memory and FLOPs, without torch."""

from gptrain.plan.batch import (
    BatchPlan,
    Lengths,
    effective_max_epochs,
    plan_batch,
    run_steps,
    token_steps,
    warmup_steps,
)
from gptrain.plan.dims import ANY_NET, ParallelDims, dims_of, parallel_dims

__all__ = [
    "ANY_NET",
    "BatchPlan",
    "Lengths",
    "ParallelDims",
    "dims_of",
    "effective_max_epochs",
    "parallel_dims",
    "plan_batch",
    "run_steps",
    "token_steps",
    "warmup_steps",
]

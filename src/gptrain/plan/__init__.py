"""What a run will cost: batch arithmetic, memory, FLOPs and communication, without torch."""

from gptrain.plan.batch import BatchPlan, plan_batch, run_steps, token_steps, warmup_steps
from gptrain.plan.degrees import Degrees, degrees, split_world

__all__ = [
    "BatchPlan",
    "Degrees",
    "degrees",
    "plan_batch",
    "run_steps",
    "split_world",
    "token_steps",
    "warmup_steps",
]

"""Parameters of a decoder that a rank holds, by strategy, and what each takes for its states."""

from __future__ import annotations

from gptrain.plan.dims import ParallelDims
from gptrain.plan.shape import DecoderShape

# States per parameter of torch's optimizers and of our Muon; of all others two, as Adam has.
_STATES = {"SGD": 0, "Adafactor": 0, "Muon": 1, "RMSprop": 1, "Adagrad": 1, "ASGD": 1}


def bytes_per_parameter(precision: str, optimizer_target: str, momentum: float = 0.0) -> int:
    """Bytes of a weight, its gradient and its optimizer states: 4 + 4 + 2 x 4 for AdamW in fp32.

    Mixed precision keeps fp32 weights: its 16-bit copies live as long as one operation. Muon
    counts with the one state of its hidden matrices; its AdamW on the rest has two.

    Args:
        precision: Lightning's name.
        optimizer_target: the `_target_` of the optimizer.
        momentum: of SGD, which has a state only with it.
    """
    name = optimizer_target.rpartition(".")[2]
    n_states = 1 if name == "SGD" and momentum else _STATES.get(name, 2)
    weight_bytes = {"bf16-true": 2, "16-true": 2, "64-true": 8, "64": 8}.get(str(precision), 4)
    return (1 + 1 + n_states) * weight_bytes


def rank_parameters(
    name: str,
    shape: DecoderShape,
    dims: ParallelDims,
    *,
    pipeline_rank: int = 0,
    stages_per_rank: int = 1,
) -> float:
    """Parameters that one rank holds under a strategy.

    Exact where sizes divide; else off by less than a row of a matrix per parameter. Uneven stages:
    ask for the largest, rank 0 or the last.
    """
    if "pipeline" in name:
        n_stages = dims.pipeline * stages_per_rank
        return shape.stage_parameters(range(pipeline_rank, n_stages, dims.pipeline), n_stages)
    held = sum(shape.tensor_parallel_parameters(dims.tensor))
    return held * dims.replicas / dims.data if "fsdp" in name else held

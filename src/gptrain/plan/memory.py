"""Parameters of a GPT that a rank holds, by strategy, and what each takes for its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptrain.plan.dims import ParallelDims, stage_blocks

# States per parameter of torch's optimizers and of our Muon; of all others two, as Adam has.
_STATES = {"SGD": 0, "Adafactor": 0, "Muon": 1, "RMSprop": 1, "Adagrad": 1, "ASGD": 1}


@dataclass(frozen=True)
class GPTShape:
    """SimpleGPT's sizes: MLP of 4 d_model, biases in all layers, head tied to the token table."""

    vocab_size: int
    d_model: int
    n_heads: int
    n_layers: int
    max_seq_len: int

    @property
    def block_parameters(self) -> int:
        """Four square and two 1:4 matrices, their biases, two norms: 12 D^2 + 13 D."""
        return 12 * self.d_model**2 + 13 * self.d_model

    @property
    def token_table_parameters(self) -> int:
        return self.vocab_size * self.d_model

    @property
    def position_table_parameters(self) -> int:
        return self.max_seq_len * self.d_model

    @property
    def block_replicated(self) -> int:
        """What tensor parallelism leaves whole in a block: two norms, two row-split biases."""
        return 6 * self.d_model

    @property
    def root_replicated(self) -> int:
        """What it leaves whole outside: the position table and the final norm."""
        return self.position_table_parameters + 2 * self.d_model

    def tensor_parallel_parameters(self, n_ranks: int) -> tuple[float, float]:
        """A rank's parameters in all blocks, and outside of them; exact where sizes divide."""
        block = (self.block_parameters - self.block_replicated) / n_ranks + self.block_replicated
        return self.n_layers * block, self.token_table_parameters / n_ranks + self.root_replicated

    def stage_parameters(self, stages: Sequence[int], n_stages: int) -> int:
        """Those that a rank of a pipeline holds; the tied weight counts on both ends."""
        n_blocks = sum(len(stage_blocks(stage, n_stages, self.n_layers)) for stage in stages)
        parameters = n_blocks * self.block_parameters
        if 0 in stages:
            parameters += self.token_table_parameters + self.position_table_parameters
        if n_stages - 1 in stages:
            parameters += 2 * self.d_model + (self.token_table_parameters if n_stages > 1 else 0)
        return parameters


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
    shape: GPTShape,
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
    return held / dims.data if "fsdp" in name else held

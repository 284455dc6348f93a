"""Sizes of a GPT, and how many parameters they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    def root_parameters(self) -> int:
        """All that is in no block: both tables and the final norm."""
        return self.token_table_parameters + self.position_table_parameters + 2 * self.d_model

    @property
    def parameters(self) -> int:
        return self.n_layers * self.block_parameters + self.root_parameters

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


def stage_blocks(stage: int, n_stages: int, n_layers: int) -> range:
    """Blocks of a stage; where they do not divide, early stages hold one more."""
    return range(*(-(-n_layers * i // n_stages) for i in (stage, stage + 1)))

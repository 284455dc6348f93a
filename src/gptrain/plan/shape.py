"""The sizes of a decoder, and how many parameters lie where: SimpleGPT's and Llama's formulas."""

# V vocab, D d_model, K d_head, F d_ff, kv the width of all k heads

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from gptrain.plan.dims import stage_blocks


@dataclass(frozen=True)
class DecoderShape:
    """A decoder of pre-norm blocks, each an attention and an MLP.

    Attributes:
        n_kv_heads: heads of k and v; fewer than n_heads are shared by groups of queries.
        has_biases: linear layers but the head, and norms, have biases.
        is_gated: the MLP has three matrices, act(gate x) * (up x) -> down.
        has_positions: a learned table of max_seq_len positions is added to the embedding.
        is_tied: the head is the token table.
        has_qk_norm: q and k are normalised by head, with a weight of its width each.
    """

    vocab_size: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    n_layers: int
    d_ff: int
    max_seq_len: int
    has_biases: bool = False
    is_gated: bool = False
    has_positions: bool = False
    is_tied: bool = False
    has_qk_norm: bool = False

    @property
    def d_kv(self) -> int:
        """Width of k, and of v."""
        return self.d_model // self.n_heads * self.n_kv_heads

    @property
    def n_parameters(self) -> int:
        """Of the whole net, each once."""
        return self.stage_parameters([0], 1)

    @property
    def matrix_weights(self) -> int:
        """Weights that multiply each token: all matrices and the head, not what is looked up."""
        return self.n_layers * self.block_matrix_weights + self.token_table_parameters

    @property
    def block_matrix_weights(self) -> int:
        """q and out, k and v, and the MLP's two or three: 2 D D + 2 D kv + (2 or 3) D F."""
        d_mlp = (2 + self.is_gated) * self.d_ff
        return self.d_model * (2 * self.d_model + 2 * self.d_kv + d_mlp)

    @property
    def block_parameters(self) -> int:
        split_biases = self.d_model + 2 * self.d_kv + (1 + self.is_gated) * self.d_ff
        return self.block_matrix_weights + self.block_replicated + self.has_biases * split_biases

    @property
    def norm_parameters(self) -> int:
        """A LayerNorm has a bias, an RMSNorm none."""
        return (1 + self.has_biases) * self.d_model

    @property
    def token_table_parameters(self) -> int:
        return self.vocab_size * self.d_model

    @property
    def position_table_parameters(self) -> int:
        return self.has_positions * self.max_seq_len * self.d_model

    @property
    def block_replicated(self) -> int:
        """What tensor parallelism leaves whole in a block: norms, the two row-split biases."""
        qk_norms = 2 * self.has_qk_norm * (self.d_model // self.n_heads)
        return 2 * self.norm_parameters + 2 * self.has_biases * self.d_model + qk_norms

    @property
    def root_replicated(self) -> int:
        """What it leaves whole outside: the position table and the final norm."""
        return self.position_table_parameters + self.norm_parameters

    def tensor_parallel_parameters(self, n_ranks: int) -> tuple[float, float]:
        """A rank's parameters in all blocks, and outside of them; exact where sizes divide."""
        block = (self.block_parameters - self.block_replicated) / n_ranks + self.block_replicated
        tables = (2 - self.is_tied) * self.token_table_parameters
        return self.n_layers * block, tables / n_ranks + self.root_replicated

    def stage_parameters(self, stages: Sequence[int], n_stages: int) -> int:
        """Those that a rank of a pipeline holds; a tied weight counts on both ends."""
        n_blocks = sum(len(stage_blocks(stage, n_stages, self.n_layers)) for stage in stages)
        parameters = n_blocks * self.block_parameters
        if 0 in stages:
            parameters += self.token_table_parameters + self.position_table_parameters
        if n_stages - 1 in stages:
            has_own_head = n_stages > 1 or not self.is_tied
            parameters += self.norm_parameters + has_own_head * self.token_table_parameters
        return parameters


def gpt_shape(
    vocab_size: int, d_model: int, n_heads: int, n_layers: int, max_seq_len: int
) -> DecoderShape:
    """SimpleGPT's: MLP of 4 d_model, biases, learned positions, head tied to the token table."""
    sizes = (vocab_size, d_model, n_heads, n_heads, n_layers, 4 * d_model, max_seq_len)
    return DecoderShape(*sizes, has_biases=True, has_positions=True, is_tied=True)


def llama_shape(
    vocab_size: int,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    n_layers: int,
    d_ff: int,
    max_seq_len: int,
    qk_norm: bool = False,
    tie_head: bool = False,
) -> DecoderShape:
    """Llama's: RMSNorm, rotary positions, grouped queries, a gated MLP, no biases."""
    sizes = (vocab_size, d_model, n_heads, n_kv_heads, n_layers, d_ff, max_seq_len)
    return DecoderShape(*sizes, is_gated=True, is_tied=tie_head, has_qk_norm=qk_norm)


# What a `_target_` of the model group is made of; a user's own net has no shape.
SHAPES = {"gptrain.models.SimpleGPT": gpt_shape, "gptrain.models.Llama": llama_shape}


def find_shape(model: Mapping[str, Any]) -> DecoderShape | None:
    """The shape of a checked model group; None for a net whose sizes are not known."""
    if (make := SHAPES.get(model["_target_"])) is None:
        return None
    return make(**{key: model[key] for key in signature(make).parameters if key in model})

"""The sizes of a decoder, and how many parameters lie where: SimpleGPT's and Llama's formulas."""

# V vocab, D d_model, F d_ff, kv the width of all k heads

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature

from gptrain.core.schema import LlamaConfig, ModelConfig, SimpleGPTConfig


@dataclass(frozen=True)
class DecoderShape:
    """A decoder of pre-norm blocks, each an attention and an MLP.

    Attributes:
        has_biases: linear layers but the head, and norms, have biases.
        is_gated: the MLP has three matrices, act(gate x) * (up x) -> down.
        n_positions: rows of a learned table that is added to the embedding.
        is_tied: the head is the token table.
        has_qk_norm: q and k are normalised by head, with a weight of its width each.
    """

    vocab_size: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    n_layers: int
    d_ff: int
    has_biases: bool = False
    is_gated: bool = False
    n_positions: int = 0
    is_tied: bool = False
    has_qk_norm: bool = False

    @property
    def d_kv(self) -> int:
        return self.d_model // self.n_heads * self.n_kv_heads

    @property
    def table(self) -> int:
        """Parameters of the token table, and of the head."""
        return self.vocab_size * self.d_model

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The sides of a block's: q and out, k and v, the MLP's two or three."""
        width, inner = self.d_model, [(self.d_ff, self.d_model)] * (1 + self.is_gated)
        return [(width, width)] * 2 + [(self.d_kv, width)] * 2 + inner + [(width, self.d_ff)]

    @property
    def block_matrices(self) -> int:
        """2 D D + 2 D kv + (2 or 3) D F."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def matrix_weights(self) -> int:
        """Weights that multiply each token: all matrices and the head, not what is looked up."""
        return self.n_layers * self.block_matrices + self.table

    @property
    def n_parameters(self) -> int:
        """Of the whole net, each once."""
        return int(self.parameters(self.n_layers, True, True))

    def parameters(
        self, n_blocks: int, is_first: bool, is_last: bool, n_tensor: int = 1, n_shards: int = 1
    ) -> float:
        """Those of some blocks, with the tables before all, with the norm and head after them.

        Where first and last are apart a tied table counts in both. Of one rank of n_tensor, which
        has norms and the two row-split biases whole: exact where sizes divide. Of the first of
        n_shards, which has its rows of each tensor, rounded up.
        """
        width, n_heads, n_tables = self.d_model, self.n_heads, is_first + is_last
        n_tables -= is_first and is_last and self.is_tied
        split = [width, self.d_kv, self.d_kv, *[self.d_ff] * (1 + self.is_gated)]  # by rows
        block: list[tuple[float, float]]
        block = [(rows / n_tensor, width + self.has_biases) for rows in split]
        block += [(width, side / n_tensor) for side in (width, self.d_ff)]  # by columns
        block += [(width, 2 + 4 * self.has_biases), (width // n_heads, 2 * self.has_qk_norm)]
        around = [(self.vocab_size / n_tensor, n_tables * width)]
        around += [(is_first * self.n_positions, width), (width, is_last * (1 + self.has_biases))]

        def held(tensors: Sequence[tuple[float, float]]) -> float:
            if n_shards == 1:
                return sum(rows * columns for rows, columns in tensors)
            return sum(math.ceil(rows / n_shards) * columns for rows, columns in tensors)

        return n_blocks * held(block) + held(around)


def gpt_shape(
    vocab_size: int, d_model: int, n_heads: int, n_layers: int, max_seq_len: int
) -> DecoderShape:
    """SimpleGPT's: MLP of 4 d_model, biases, learned positions, head tied to the token table."""
    sizes = (vocab_size, d_model, n_heads, n_heads, n_layers, 4 * d_model)
    return DecoderShape(*sizes, has_biases=True, n_positions=max_seq_len, is_tied=True)


def llama_shape(
    vocab_size: int, d_model: int, n_heads: int, n_kv_heads: int, n_layers: int, d_ff: int,
    qk_norm: bool = False, tie_head: bool = False,
) -> DecoderShape:  # fmt: skip
    """Llama's: RMSNorm, rotary positions, grouped queries, a gated MLP, no biases."""
    sizes = (vocab_size, d_model, n_heads, n_kv_heads, n_layers, d_ff)
    return DecoderShape(*sizes, is_gated=True, is_tied=tie_head, has_qk_norm=qk_norm)


def find_shape(model: ModelConfig) -> DecoderShape | None:
    """Return the shape of a model group, or None for a net that does not ship."""
    make = gpt_shape if isinstance(model, SimpleGPTConfig) else llama_shape
    if not isinstance(model, SimpleGPTConfig | LlamaConfig):
        return None
    return make(**{key: getattr(model, key) for key in signature(make).parameters})

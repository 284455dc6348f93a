"""The sizes of a decoder, and how many parameters lie where: SimpleGPT's and Llama's formulas."""

# V vocab, D d_model, F d_ff, kv the width of all k heads

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any


@dataclass(frozen=True)
class DecoderShape:
    """A decoder of pre-norm blocks, each an attention and an MLP.

    Attributes:
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
    def table(self) -> int:
        """Parameters of the token table, and of the head."""
        return self.vocab_size * self.d_model

    @property
    def block_matrices(self) -> int:
        """q and out, k and v, and the MLP's two or three: 2 D D + 2 D kv + (2 or 3) D F."""
        inner = (2 + self.is_gated) * self.d_ff
        return self.d_model * (2 * self.d_model + 2 * self.d_kv + inner)

    @property
    def matrix_weights(self) -> int:
        """Weights that multiply each token: all matrices and the head, not what is looked up."""
        return self.n_layers * self.block_matrices + self.table

    @property
    def norm(self) -> int:
        """Parameters of a norm; an RMSNorm has no bias."""
        return (1 + self.has_biases) * self.d_model

    @property
    def block_replicated(self) -> int:
        """What tensor parallelism leaves whole in a block: norms, the two row-split biases."""
        qk_norms = 2 * self.has_qk_norm * (self.d_model // self.n_heads)
        return 2 * self.norm + 2 * self.has_biases * self.d_model + qk_norms

    @property
    def n_parameters(self) -> int:
        """Of the whole net, each once."""
        return int(self.parameters(self.n_layers, is_first=True, is_last=True))

    def parameters(
        self, n_blocks: int, *, is_first: bool, is_last: bool, n_tensor: int = 1
    ) -> float:
        """Those of some blocks, with the tables before all, with the norm and head after them.

        A tied head is the first's table, a second copy where that is elsewhere. Exact where the
        sizes divide by the n_tensor ranks of a tensor group, of which one rank's are counted.
        """
        biases = self.has_biases * (self.d_model + 2 * self.d_kv + (1 + self.is_gated) * self.d_ff)
        block = (self.block_matrices + biases) / n_tensor + self.block_replicated
        n_tables = is_first + (is_last and not (is_first and self.is_tied))
        positions = is_first * self.has_positions * self.max_seq_len * self.d_model
        return n_blocks * block + n_tables * self.table / n_tensor + positions + is_last * self.norm


def gpt_shape(
    vocab_size: int, d_model: int, n_heads: int, n_layers: int, max_seq_len: int
) -> DecoderShape:
    """SimpleGPT's: MLP of 4 d_model, biases, learned positions, head tied to the token table."""
    sizes = (vocab_size, d_model, n_heads, n_heads, n_layers, 4 * d_model, max_seq_len)
    return DecoderShape(*sizes, has_biases=True, has_positions=True, is_tied=True)


def llama_shape(
    vocab_size: int, d_model: int, n_heads: int, n_kv_heads: int, n_layers: int, d_ff: int,
    max_seq_len: int, qk_norm: bool = False, tie_head: bool = False,
) -> DecoderShape:  # fmt: skip
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

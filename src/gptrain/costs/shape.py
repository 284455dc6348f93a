"""Sizes of a decoder, and the number of parameters that each rank holds.

The formulas count the parameters of `gptrain.models.SimpleGPT` and `gptrain.models.Llama`. A test
compares them with the nets themselves.

Symbols in the formulas: V vocab_size, D d_model, F d_ff, D_q and D_kv the widths of all query heads
and of all key heads together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature

from gptrain.core.schema import LlamaConfig, ModelConfig, SimpleGPTConfig


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder whose blocks are pre-norm: an attention and an MLP with residuals.

    Attributes:
        vocab_size: Number of tokens in the vocabulary, V.
        d_model: Width of the residual stream, D.
        n_heads: Number of query heads.
        n_kv_heads: Number of key heads, which is also the number of value heads.
        n_layers: Number of blocks.
        d_ff: Width inside the MLP, F.
        has_biases: True if the norms and all linear layers except the head have biases.
        is_gated: True if the MLP has three matrices: down(act(gate(x)) * up(x)).
        n_positions: Rows of the learned position table. 0 if there is no such table.
        is_tied: True if the head uses the weights of the token table.
        has_qk_norm: True if queries and keys are normalized per head. All heads share one weight
            for queries and one for keys.
        d_head: Width of a head. None for `d_model / n_heads`.
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
    d_head: int | None = None

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.d_head or self.d_model // self.n_heads

    @property
    def d_q(self) -> int:
        """Width of all query heads together, D_q."""
        return self.head_width * self.n_heads

    @property
    def d_kv(self) -> int:
        """Width of all key heads together, D_kv."""
        return self.head_width * self.n_kv_heads

    @property
    def n_up_matrices(self) -> int:
        """Number of matrices that map d_model to d_ff: up, and the gate of a gated MLP."""
        return 2 if self.is_gated else 1

    @property
    def table(self) -> int:
        """Number of parameters of the token table, which the head has as well: V D."""
        return self.vocab_size * self.d_model

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Shapes (rows, columns) of a block's matrices: q, out, k, v, then those of the MLP."""
        attention = [(self.d_q, self.d_model), (self.d_model, self.d_q)]
        attention += [(self.d_kv, self.d_model)] * 2
        up = [(self.d_ff, self.d_model)] * self.n_up_matrices
        return [*attention, *up, (self.d_model, self.d_ff)]

    @property
    def block_matrices(self) -> int:
        """Number of weights in a block's matrices: 2 D (D_q + D_kv), and 2 D F or, if gated, 3 D F.

        D is d_model, F is d_ff, D_q and D_kv are the widths of all query heads and of all key
        heads.
        """
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def matrix_weights(self) -> int:
        """Number of weights that multiply each token: all matrices and the head.

        A head that is tied to the token table counts. The tables, which are looked up, do not.
        """
        return self.n_layers * self.block_matrices + self.table

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the model. A tied weight counts once."""
        return int(self.parameters(self.n_layers, True, True))

    def parameters(
        self, n_blocks: int, is_first: bool, is_last: bool, n_tensor: int = 1, n_shards: int = 1
    ) -> float:
        """Return the number of parameters that one rank holds of a part of the model.

        Args:
            n_blocks: Number of blocks in the part.
            is_first: True if the part has the token table and the position table.
            is_last: True if the part has the last norm and the head. A tied table counts once if
                the part is first and last. Otherwise each of the two parts has a copy.
            n_tensor: Number of tensor-parallel ranks that split the part. Norms, the position
                table and the biases of out and down are not split. The result is exact if
                `n_tensor` divides the sizes.
            n_shards: Number of FSDP shards of each tensor. The result is the size of the first
                shard, which has ceil(rows / n_shards) rows.
        """
        n_biases = 1 if self.has_biases else 0  # number of biases of a linear layer, and of a norm
        n_tables = (1 if is_first else 0) + (1 if is_last else 0)
        if is_first and is_last and self.is_tied:
            n_tables = 1

        # Sizes (rows, columns) of the tensors of a block. A bias is a column more.
        column_parallel = [self.d_q, self.d_kv, self.d_kv]  # rows of q, k, v
        column_parallel += [self.d_ff] * self.n_up_matrices
        block: list[tuple[float, float]]
        block = [(rows / n_tensor, self.d_model + n_biases) for rows in column_parallel]
        block += [(self.d_model, columns / n_tensor) for columns in (self.d_q, self.d_ff)]
        # The weights of two norms. With biases: the biases of the norms, of out and of down.
        block += [(self.d_model, 2 + 4 * n_biases)]
        n_head_norms = 2 if self.has_qk_norm else 0
        block += [(self.head_width, n_head_norms)]

        n_positions = self.n_positions if is_first else 0
        n_last_norm_vectors = 1 + n_biases if is_last else 0
        root = [(self.vocab_size / n_tensor, n_tables * self.d_model)]
        root += [(n_positions, self.d_model), (self.d_model, n_last_norm_vectors)]

        def count(tensors: Sequence[tuple[float, float]]) -> float:
            if n_shards == 1:
                return sum(rows * columns for rows, columns in tensors)
            return sum(math.ceil(rows / n_shards) * columns for rows, columns in tensors)

        return n_blocks * count(block) + count(root)


def gpt_shape(
    vocab_size: int, d_model: int, n_heads: int, n_layers: int, max_seq_len: int
) -> DecoderShape:
    """Return the shape of a SimpleGPT.

    SimpleGPT has an MLP of width 4 d_model, biases, a learned position table, and a head that is
    tied to the token table.

    Args:
        vocab_size: Number of tokens in the vocabulary.
        d_model: Width of the residual stream.
        n_heads: Number of heads of queries, keys and values.
        n_layers: Number of blocks.
        max_seq_len: Rows of the position table.
    """
    return DecoderShape(
        vocab_size,
        d_model,
        n_heads,
        n_kv_heads=n_heads,
        n_layers=n_layers,
        d_ff=4 * d_model,
        has_biases=True,
        n_positions=max_seq_len,
        is_tied=True,
    )


def llama_shape(
    vocab_size: int, d_model: int, n_heads: int, n_kv_heads: int, n_layers: int, d_ff: int,
    qk_norm: bool = False, tie_head: bool = False, d_head: int | None = None,
) -> DecoderShape:  # fmt: skip
    """Return the shape of a Llama: RMSNorm, rotary positions, a gated MLP, and no biases.

    Args:
        vocab_size: Number of tokens in the vocabulary.
        d_model: Width of the residual stream.
        n_heads: Number of query heads.
        n_kv_heads: Number of key heads, which is also the number of value heads.
        n_layers: Number of blocks.
        d_ff: Width inside the MLP.
        qk_norm: True if queries and keys are normalized per head.
        tie_head: True if the head uses the weights of the token table.
        d_head: Width of a head. None for `d_model / n_heads`.
    """
    return DecoderShape(
        vocab_size,
        d_model,
        n_heads,
        n_kv_heads,
        n_layers,
        d_ff,
        is_gated=True,
        is_tied=tie_head,
        has_qk_norm=qk_norm,
        d_head=d_head,
    )


def find_shape(model: ModelConfig) -> DecoderShape | None:
    """Return the shape of the net that a config describes, or None for a net without formulas.

    There are formulas for SimpleGPT and Llama. The planner traces a step of any other net instead.

    Args:
        model: `model` group of the config.
    """
    if isinstance(model, SimpleGPTConfig):
        make_shape = gpt_shape
    elif isinstance(model, LlamaConfig):
        make_shape = llama_shape
    else:
        return None
    return make_shape(**{key: getattr(model, key) for key in signature(make_shape).parameters})

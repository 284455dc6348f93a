"""Sizes of a decoder: parameters of a rank, and FLOPs of a token.

The formulas count the parameters of `gptrain.models.SimpleGPT` and `gptrain.models.Llama`. Symbols:
V vocab_size, D d_model, F d_ff, D_q and D_kv the widths of all query heads and of all key heads.
"""

from dataclasses import dataclass
from typing import Any

from gptrain.core.schema import LlamaConfig, ModelConfig, SimpleGPTConfig


@dataclass(frozen=True)
class Net:
    """Sizes of a decoder whose blocks are pre-norm: attention and an MLP with residuals.

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
        has_qk_norm: True if queries and keys are normalized per head, with one weight each.
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
    def d_q(self) -> int:
        """Width of all query heads together, D_q."""
        return self.n_heads * (self.d_head or self.d_model // self.n_heads)

    @property
    def d_kv(self) -> int:
        """Width of all key heads together, D_kv."""
        return self.d_q // self.n_heads * self.n_kv_heads

    @property
    def n_up(self) -> int:
        """Number of matrices that map d_model to d_ff: up, and the gate of a gated MLP."""
        return 2 if self.is_gated else 1

    @property
    def table(self) -> int:
        """Number of weights of the token table, which is also that of the head: V D."""
        return self.vocab_size * self.d_model

    @property
    def block_matrices(self) -> int:
        """Number of weights in a block's matrices.

        It is 2 D (D_q + D_kv) for attention, and 2 D F for the MLP, or 3 D F if it is gated.
        """
        return (
            2 * self.d_model * (self.d_q + self.d_kv) + (self.n_up + 1) * self.d_model * self.d_ff
        )

    @property
    def matrix_weights(self) -> int:
        """Number of weights that multiply each token: all matrices and the head, also if tied."""
        return self.n_layers * self.block_matrices + self.table

    def parameters(self, n_blocks: int, is_first: bool, is_last: bool, n_tensor: int = 1) -> float:
        """Return the number of parameters that one rank holds of a part of the net.

        Args:
            n_blocks: Number of blocks in the part.
            is_first: True if the part has the token table and the position table.
            is_last: True if the part has the last norm and the head. A tied table counts once if
                the part is first and last. Otherwise each of the two parts has a copy.
            n_tensor: Number of tensor-parallel ranks that split the part. Norms, the position
                table and the biases of out and down are not split. The result is exact if
                `n_tensor` divides the sizes.
        """
        n_biases = 1 if self.has_biases else 0  # of a linear layer, and of a norm
        n_tables = 1 if self.is_tied and is_first and is_last else [is_first, is_last].count(True)
        split = self.block_matrices + n_biases * (self.d_q + 2 * self.d_kv + self.n_up * self.d_ff)
        # The weights of two norms. With biases: the biases of the norms, of out and of down.
        block = split / n_tensor + (2 + 4 * n_biases) * self.d_model
        if self.has_qk_norm:
            block += 2 * self.d_q / self.n_heads
        root = n_tables * self.table / n_tensor
        root += self.n_positions * self.d_model if is_first else 0
        root += (1 + n_biases) * self.d_model if is_last else 0
        return n_blocks * block + root


def net_of(model: ModelConfig) -> Net | None:
    """Return the sizes of the net of a `model` group. None if it is no SimpleGPT and no Llama."""
    if isinstance(model, SimpleGPTConfig):
        sizes = (model.vocab_size, model.d_model, model.n_heads, model.n_heads, model.n_layers)
        more: dict[str, Any] = {"has_biases": True, "is_tied": True}
        return Net(*sizes, 4 * model.d_model, **more, n_positions=model.max_seq_len)
    if isinstance(model, LlamaConfig):
        sizes = (model.vocab_size, model.d_model, model.n_heads, model.n_kv_heads, model.n_layers)
        more: dict[str, Any] = {"has_qk_norm": model.qk_norm, "is_tied": model.tie_head}
        return Net(*sizes, model.d_ff, is_gated=True, d_head=model.d_head, **more)
    return None


def train_flops_per_token(
    n_matrix_weights: int, n_layers: int, d_attention: int, seq_len: int
) -> int:
    """Return the model FLOPs of one token in a forward and backward pass: 6 N + 12 L (H Q) T.

    A multiply-add is two FLOPs. Causal attention counts as full attention. Recomputation and the
    optimizer do not count.

    Args:
        n_matrix_weights: N, number of weights that multiply each token. These are all matrices and
            the head, also if the head is tied to the token table. Embedding tables do not count.
        n_layers: L, number of attention layers.
        d_attention: H Q, number of heads times the width of a head.
        seq_len: T, number of positions in a sequence.

    Source: Chowdhery et al. 2022, "PaLM", appendix B, arXiv:2204.02311.
    """
    return 6 * n_matrix_weights + 12 * n_layers * d_attention * seq_len

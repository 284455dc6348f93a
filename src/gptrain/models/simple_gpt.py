"""SimpleGPT: a decoder-only transformer with GPT-2's architecture and initialisation.

Pre-LayerNorm, causal self-attention, GELU MLP of 4 * d_model, learned positions, head tied to the
token embedding. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

# B batch, T time, D d_model, H heads, K d_head, V vocab

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.models import gpt2_layout
from gptrain.models.cache import LayerCache
from gptrain.models.decoder import Decoder, make_embedding

GELU_APPROXIMATION = {"gelu": "none", "gelu_tanh": "tanh"}  # the second is GPT-2's own


class SimpleGPT(Decoder):
    """GPT-2's architecture with q, k and v as projections of their own, so that heads can be split.

    Args:
        dropout: on the embedding, the attention weights, and both residual branches.
        activation: "gelu" (exact), or "gelu_tanh" (the approximation GPT-2 was trained with).

    Raises: ValueError if n_heads does not divide d_model, or the activation is not known.
    """

    tensor_plan: ClassVar[dict[str, str]] = {
        "token_embedding": "vocab_embedding",
        "position_embedding": "position_embedding",
        "blocks.*.norm_[12]": "sequence",
        "blocks.*.attention.[qkv]_proj": "colwise",
        "blocks.*.attention.out_proj": "rowwise",
        "blocks.*.mlp.up_proj": "colwise",
        "blocks.*.mlp.down_proj": "rowwise",
        "norm": "sequence",
        "head": "vocab_head",
    }

    def __init__(
        self,
        vocab_size: int = 50257,
        d_model: int = 512,
        n_heads: int = 8,
        n_layers: int = 6,
        max_seq_len: int = 512,
        dropout: float = 0.1,
        activation: str = "gelu",
    ):
        super().__init__(vocab_size, d_model, n_heads, n_layers, max_seq_len, tie_head=True)
        self.activation = activation

        with torch.device("meta"):
            self.token_embedding = make_embedding(vocab_size, d_model)
            self.position_embedding = make_embedding(max_seq_len, d_model)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(
                Block(d_model, n_heads, dropout, activation) for _ in range(n_layers)
            )
            self.norm = nn.LayerNorm(d_model)
            self.head = nn.Linear(d_model, vocab_size, bias=False)
            self.head.weight = self.token_embedding.weight

        self.fill()

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Sum of token and position embeddings (B, T, D); the rest as in Decoder."""
        x = super().embed(tokens, start)
        positions = torch.arange(start, start + tokens.shape[-1], device=tokens.device)
        return self.dropout(x + self.position_embedding(positions))

    to_hugging_face, from_hugging_face = gpt2_layout.to_gpt2, gpt2_layout.from_gpt2


class Block(nn.Module):
    """Pre-norm transformer block, (B, T, D) -> (B, T, D), alone or after what a cache holds."""

    def __init__(self, d_model: int, n_heads: int, dropout: float, activation: str):
        super().__init__()
        self.norm_1 = nn.LayerNorm(d_model)
        self.attention = CausalSelfAttention(d_model, n_heads, dropout)
        self.norm_2 = nn.LayerNorm(d_model)
        self.mlp = MLP(d_model, activation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), cache))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class CausalSelfAttention(nn.Module):
    """Each position attends to itself and to those before it."""

    def __init__(self, d_model: int, n_heads: int, dropout: float):
        super().__init__()
        if d_model % n_heads:
            raise ValueError(
                f"n_heads={n_heads}: does not divide d_model={d_model}, all heads are of one size"
            )
        self.d_head = d_model // n_heads
        self.dropout = dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        q, k, v = (
            # H is read off the width: this rank's heads where the columns are split over ranks
            projection(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2)  # (B, H, T, K)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v, mask = (k, v, None) if cache is None else cache.extend(k, v)
        dropout, is_causal = self.dropout if self.training else 0.0, mask is None
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        return self.out_proj(y.transpose(1, 2).flatten(2))  # (B, H, T, K) -> (B, T, D)


class MLP(nn.Module):
    """Two linear layers around a GELU, 4 * d_model wide inside."""

    def __init__(self, d_model: int, activation: str):
        super().__init__()
        if activation not in GELU_APPROXIMATION:
            raise ValueError(
                f"activation={activation!r}: not known; allowed: {', '.join(GELU_APPROXIMATION)}"
            )
        self.up_proj = nn.Linear(d_model, 4 * d_model)
        self.activation = nn.GELU(approximate=GELU_APPROXIMATION[activation])
        self.down_proj = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))

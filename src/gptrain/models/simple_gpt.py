"""SimpleGPT: a decoder-only transformer with GPT-2's architecture and initialisation.

Pre-LayerNorm, causal self-attention, GELU MLP of 4 * d_model, learned positions, head tied to the
token embedding. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

# B batch, T time, D d_model

from typing import ClassVar

import torch
from torch import Tensor, nn

from gptrain.models import gpt2_layout
from gptrain.models.decoder import Block, CausalSelfAttention, Decoder, make_embedding

GELU_APPROXIMATION = {"gelu": "none", "gelu_tanh": "tanh"}  # the second is GPT-2's own


class SimpleGPT(Decoder):
    """GPT-2's architecture with q, k and v as projections of their own, so that heads can be split.

    Args:
        dropout: on the embedding, the attention weights, and both residual branches.
        activation: "gelu" (exact), or "gelu_tanh" (the approximation GPT-2 was trained with).

    Raises: ValueError if n_heads does not divide d_model, or the activation is not known.
    """

    tensor_plan: ClassVar[dict[str, str]] = {
        **Decoder.tensor_plan,
        "position_embedding": "position_embedding",
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
        if d_model % n_heads:
            message = f"does not divide d_model={d_model}, all heads are of one size"
            raise ValueError(f"n_heads={n_heads}: {message}")
        self.activation = activation

        with torch.device("meta"):
            self.token_embedding = make_embedding(vocab_size, d_model)
            self.position_embedding = make_embedding(max_seq_len, d_model)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(
                Block(
                    nn.LayerNorm(d_model),
                    CausalSelfAttention(d_model, n_heads, n_heads, bias=True, dropout=dropout),
                    nn.LayerNorm(d_model),
                    MLP(d_model, activation),
                    dropout,
                )
                for _ in range(n_layers)
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


class MLP(nn.Module):
    def __init__(self, d_model: int, activation: str):
        super().__init__()
        if activation not in GELU_APPROXIMATION:
            allowed = ", ".join(GELU_APPROXIMATION)
            raise ValueError(f"activation={activation!r}: not known; allowed: {allowed}")
        self.up_proj = nn.Linear(d_model, 4 * d_model)
        self.activation = nn.GELU(approximate=GELU_APPROXIMATION[activation])
        self.down_proj = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))

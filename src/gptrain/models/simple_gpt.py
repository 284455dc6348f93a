"""SimpleGPT, a decoder-only transformer with GPT-2's architecture and initialization.

A block has LayerNorm before each part, causal self-attention, and a GELU MLP of width 4 * d_model.
Positions are learned, and the head is tied to the token embedding.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

# B batch, T time, D d_model

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from gptrain.models import hf_layout
from gptrain.models.attention import CausalSelfAttention, SequenceLayout
from gptrain.models.decoder import Block, Decoder, make_embedding

_GELU_APPROXIMATION = {"gelu": "none", "gelu_tanh": "tanh"}  # GPT-2 was trained with gelu_tanh


class SimpleGPT(Decoder):
    """GPT-2: a decoder with learned positions, LayerNorm, a GELU MLP and a tied head.

    Unlike GPT-2, the projections of q, k and v are separate layers, so that tensor parallelism can
    split them by heads.

    Args:
        vocab_size: Number of token ids V.
        d_model: Width D of the residual stream.
        n_heads: Number of attention heads.
        n_layers: Number of blocks.
        max_seq_len: Largest number of positions of a sequence: the size of the position table.
        dropout: Dropout probability of the embedding, of the attention weights and of the outputs
            of attention and MLP.
        activation: Activation of the MLP: "gelu" (exact) or "gelu_tanh" (the approximation with
            which GPT-2 was trained).

    Raises:
        ValueError: If `n_heads` does not divide `d_model`.
        KeyError: If `activation` is neither of the two.
    """

    tensor_plan: ClassVar[dict[str, str]] = {
        **Decoder.tensor_plan,
        "position_embedding": "position_embedding",
    }

    def __init__(
        self, vocab_size: int = 50257, d_model: int = 512, n_heads: int = 8, n_layers: int = 6,
        max_seq_len: int = 512, dropout: float = 0.1, activation: str = "gelu",
    ):  # fmt: skip
        super().__init__(vocab_size, d_model, n_heads, n_layers, max_seq_len, tie_head=True)
        self.activation = activation
        with torch.device("meta"):
            self.position_embedding = make_embedding(max_seq_len, d_model)
        self.dropout = nn.Dropout(dropout)
        norm = partial(nn.LayerNorm, d_model)
        sizes = d_model, n_heads, n_heads, self.d_head
        attention = partial(CausalSelfAttention, *sizes, bias=True, dropout=dropout)
        mlp = partial(MLP, d_model, activation)
        self.build(lambda: Block(norm(), attention(), norm(), mlp(), dropout), norm)

    def embed(self, tokens: Tensor, start: int = 0, layout: SequenceLayout | None = None) -> Tensor:
        """Compute the sum of token and position embeddings (B, T, D), with dropout.

        Arguments and errors are those of `Decoder.embed`.
        """
        x = super().embed(tokens, start, layout)
        if layout is None:
            positions = torch.arange(start, start + tokens.shape[-1], device=tokens.device)
        else:
            positions = layout.positions
        return self.dropout(x + self.position_embedding(positions))

    to_hugging_face = hf_layout.to_gpt2
    from_hugging_face = hf_layout.from_gpt2


class MLP(nn.Module):
    """MLP with a hidden layer of width 4 * d_model. `activation` is that of `SimpleGPT`."""

    def __init__(self, d_model: int, activation: str):
        super().__init__()
        self.up_proj = nn.Linear(d_model, 4 * d_model)
        self.activation = nn.GELU(approximate=_GELU_APPROXIMATION[activation])
        self.down_proj = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP, (B, T, D) -> (B, T, D)."""
        return self.down_proj(self.activation(self.up_proj(x)))

"""What multi-GPU tutorials train: a GPT out of nn.TransformerDecoder, in the plainest of loops.

Kept as such code is written, because it is what a user would otherwise start from: the decoder is
fed with its own embeddings as memory, the head is a matrix of its own, all logits exist at once,
the optimizer has its default implementation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

# B batch, T time, D d_model, V vocab


class TutorialGPT(nn.Module):
    """tokens (B, T) -> logits (B, T, V)."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        max_seq_len: int,
        dropout: float,
    ):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(max_seq_len, d_model)
        layer = nn.TransformerDecoderLayer(
            d_model, n_heads, 4 * d_model, dropout, activation="gelu", batch_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, n_layers)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, D)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.decoder(x, x, tgt_mask=mask, memory_mask=mask)
        return self.head(x)  # (B, T, V)


def tutorial_loss(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of materialised logits."""
    logits = net(tokens)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class RandomText(Dataset):
    """Random tokens, drawn one sample at a time."""

    def __init__(self, n_samples: int, seq_len: int, vocab_size: int):
        self.n_samples, self.seq_len, self.vocab_size = n_samples, seq_len, vocab_size

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocab_size, (self.seq_len,))
        return tokens[:-1], tokens[1:]

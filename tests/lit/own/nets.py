"""Nets and optimizers as a user writes them."""

from __future__ import annotations

import torch
from torch import nn


class Tied(nn.Module):
    """A net that only maps tokens to logits."""

    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.table, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.out(self.table(tokens))


class ReturnsPair(Tied):
    """A net whose forward returns a pair, like those of transformers with a cache."""

    def forward(self, tokens):
        return super().forward(tokens), None


class RunningMeans(nn.Module):
    """A net whose buffers change in training: those of BatchNorm, and one that is replaced."""

    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.table, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.blocks = nn.ModuleList([nn.BatchNorm1d(width), nn.BatchNorm1d(width)])
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, tokens):
        x = self.table(tokens)  # (B, T, D)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
        x = (x - self.mean).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.transpose(1, 2))

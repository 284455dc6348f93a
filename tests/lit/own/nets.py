"""A net as a user writes it."""

from torch import nn


class ReturnsPair(nn.Module):
    """A net whose forward returns a pair, like those of transformers with a cache."""

    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.table, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.out(self.table(tokens)), None

"""Random tokens, for runs that test speed or a configuration instead of learning.

# B batch, S seq_len
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gptrain.data.order import GOLDEN, mix64
from gptrain.data.samples import BatchDataset


@dataclass(eq=False)
class DummyTextDataset(BatchDataset):
    """Dataset of uniform random tokens, in which sample i depends on `seed` and i only.

    The lowest possible loss is ln(vocab_size) nats per token, because a token says nothing about
    the next one. The probability of a token differs from 1 / vocab_size by at most 2^-32.

    Args:
        num_samples: Number of samples.
        seq_len: Tokens drawn per sample. A sample has `seq_len - 1` positions, because the last
            token is a target only.
        vocab_size: Number of different tokens, below 2^31.
        seed: Seed of the tokens. The validation set needs another seed than the training set.
    """

    num_samples: int = 10000
    seq_len: int = 128
    vocab_size: int = 50257
    seed: int = 0

    def __post_init__(self) -> None:
        self._key = mix64(np.array([self.seed + GOLDEN], dtype=np.uint64))
        self._offsets = np.arange(1, self.seq_len + 1, dtype=np.uint64) * GOLDEN  # (S,)

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch: tokens and targets, both (B, seq_len - 1) and int64."""
        # Each sample is a SplitMix64 stream that starts at a hash of the seed and the sample index.
        starts = mix64(np.asarray(indices, dtype=np.uint64) * GOLDEN + self._key)  # (B,)
        tokens = mix64(starts[:, None] + self._offsets)  # (B, S)
        tokens >>= 32
        tokens *= self.vocab_size
        tokens >>= 32  # the upper half of a 32 x 31 bit product is uniform over [0, V)
        tokens = torch.from_numpy(tokens.view(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

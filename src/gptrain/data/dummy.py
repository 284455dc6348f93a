"""Random tokens: what is trained on when speed or plumbing is the question, not learning.

# B batch, S seq_len
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gptrain.data.order import GOLDEN, mix64
from gptrain.data.samples import BatchDataset


class DummyTextDataset(BatchDataset):
    """Uniform random tokens, sample i a pure function of (seed, i); the loss floor is ln V.

    A token's probability differs from 1/V by at most 2^-32.

    Args:
        seq_len: tokens drawn per sample, one more than the positions trained on.
        vocab_size: V, below 2^31.   seed: use another one for validation.
    """

    def __init__(
        self,
        num_samples: int = 10000,
        seq_len: int = 128,
        vocab_size: int = 50257,
        seed: int = 0,
    ) -> None:
        self.num_samples, self.vocab_size = num_samples, vocab_size
        self._key = mix64(np.array([seed + GOLDEN], dtype=np.uint64))
        self._places = np.arange(1, seq_len + 1, dtype=np.uint64) * GOLDEN  # (S,)

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A whole batch at once: tokens (B, S-1) and targets (B, S-1), int64."""
        # Each sample is a SplitMix64 stream of its own, started at a mixed (seed, i).
        samples = np.asarray(indices, dtype=np.uint64)  # (B,)
        starts = mix64(samples * GOLDEN + self._key)
        tokens = mix64(starts[:, None] + self._places)  # (B, S)
        tokens >>= 32
        tokens *= self.vocab_size
        tokens >>= 32  # the upper half of a 32 x 31 bit product: uniform over [0, V)
        tokens = torch.from_numpy(tokens.view(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

"""Random tokens: what is trained on when speed or plumbing is the question, not learning.

# B batch, S seq_len
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gptrain.data.order import GOLDEN, mix64, stream, stream_key

_32 = np.uint64(32)


class DummyTextDataset(Dataset):
    """Uniform random tokens, sample i a pure function of (seed, i); the loss floor is ln V.

    `dataset[i]` is `(tokens[:-1], tokens[1:])`, so seq_len tokens make seq_len - 1 positions.
    A token's probability differs from 1/V by at most 2^-32.

    Args:
        num_samples: length of the data set.
        seq_len: tokens drawn per sample, one more than the positions trained on.
        seed: other seeds give other samples; use another one for validation.
    """

    token_bytes = None  # these tokens stand for no text

    def __init__(
        self,
        num_samples: int = 10000,
        seq_len: int = 128,
        vocab_size: int = 50257,
        seed: int = 0,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: must be >= 1")
        if seq_len < 2:
            raise ValueError(f"seq_len={seq_len}: must be >= 2, one token and its target")
        if not 1 <= vocab_size < 2**31:
            raise ValueError(f"vocab_size={vocab_size}: must be in 1 .. 2^31-1")
        self.num_samples, self.seq_len, self.vocab_size = num_samples, seq_len, vocab_size
        self.seed = seed
        self._key = np.uint64(stream_key(seed))
        self._places = stream(0, seq_len)  # (S,)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample: tokens (S-1,) and targets (S-1,), int64."""
        tokens, targets = self.__getitems__([index])
        return tokens[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A whole batch at once: tokens (B, S-1) and targets (B, S-1), int64."""
        samples = np.asarray(indices, dtype=np.int64)  # (B,)
        samples = np.where(samples < 0, samples + self.num_samples, samples)
        if samples.size and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise IndexError(f"sample {list(indices)}: there are {self.num_samples}")
        # Each sample is a SplitMix64 stream of its own, started at a mixed (seed, i).
        starts = mix64(samples.astype(np.uint64) * np.uint64(GOLDEN) + self._key)
        tokens = mix64(starts[:, None] + self._places)  # (B, S)
        tokens >>= _32
        tokens *= np.uint64(self.vocab_size)
        tokens >>= _32  # the upper half of a 32 x 31 bit product: uniform over [0, V)
        tokens = torch.from_numpy(tokens.view(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

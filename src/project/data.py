"""Your data: a dataset of (tokens (T,), targets (T,)), int64. Targets of -100 do not count."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class MyDigits(Dataset):
    """Samples that count up, digit by digit. Config: conf/data/my_digits.yaml.

    Args:
        first: Number with which sample 0 begins. Sample i begins with first + i.
        n_samples: Number of samples.
        seq_len: Number of tokens T of a sample.
    """

    def __init__(self, first: int, n_samples: int, seq_len: int):
        self.first, self.n_samples, self.seq_len = first, n_samples, seq_len

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        text = "".join(str(self.first + index + k) for k in range(self.seq_len + 1))
        digits = torch.tensor([int(digit) for digit in text[: self.seq_len + 1]])
        return digits[:-1], digits[1:]

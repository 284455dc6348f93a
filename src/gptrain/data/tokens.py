"""Token files as a data set: windows of consecutive tokens, gathered from memory maps.

# B batch, T seq_len
"""

import os
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gptrain.data.errors import DataError
from gptrain.data.order import IGNORE
from gptrain.data.token_files import (
    TokenFile,
    check_tokens,
    count_windows,
    find_token_files,
    hash_files,
    open_token_file,
    sample_tokens,
)


class TokenDataset(Dataset):
    """One or many token files; sample i is T tokens in a row and the T that follow one later.

    Windows overlap by the one token that is target here and input there, and never cross a file.

    Args:
        path: a file, a glob pattern, or a list of either.   seq_len: T.
        dtype: of raw files; one with a header says it itself.
        vocab_size: tokens at or above it are a DataError that names file and place: sampled
            now, and exactly in each batch that is read. None: no check.
        keep_tail: the last tokens of a file, too few for a window, make one all the same, filled
            up with targets -100; then every token but a file's first is a target exactly once.
        token_bytes: (V,) bytes of text that each token stands for, if known.
    Raises: FileNotFoundError; DataError for files that are damaged or hold no window at all.
    """

    def __init__(
        self,
        path: str | os.PathLike | Sequence[str | os.PathLike],
        seq_len: int,
        dtype: str | None = None,
        vocab_size: int | None = None,
        keep_tail: bool = False,
        token_bytes: np.ndarray | None = None,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len}: must be >= 1")
        self.files = [open_token_file(file, dtype) for file in find_token_files(path)]
        self.seq_len, self.vocab_size, self.keep_tail = seq_len, vocab_size, keep_tail
        self.token_bytes = token_bytes
        if vocab_size is not None:
            for file in self.files:
                sample_tokens(file, vocab_size)
        lengths = [count_windows(file.n_tokens, seq_len, keep_tail) for file in self.files]
        self._first = np.cumsum([0, *lengths])  # (files + 1,) first window of each file
        self._windows: dict[int, np.ndarray] = {}
        if not len(self):
            raise DataError(
                f"{self.files[0].path}: {self.n_tokens} tokens;"
                f" need at least seq_len+1 = {seq_len + 1}"
            )

    @property
    def n_tokens(self) -> int:
        """Tokens in all files."""
        return sum(file.n_tokens for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same tokens: a resumed run must find those it began with."""
        return hash_files(self.files)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample: tokens (T,) and targets (T,), int64."""
        tokens, targets = self.__getitems__([index])
        return tokens[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A whole batch in one gather per file: tokens (B, T) and targets (B, T), int64."""
        samples = np.asarray(indices, dtype=np.int64)  # (B,)
        samples = np.where(samples < 0, samples + len(self), samples)
        if samples.size and not 0 <= samples.min() <= samples.max() < len(self):
            raise IndexError(f"sample {list(indices)}: there are {len(self)}")
        owners = np.searchsorted(self._first, samples, side="right") - 1
        batch = np.empty((len(samples), self.seq_len + 1), dtype=np.int64)  # (B, T+1)
        for number in np.unique(owners):
            rows = owners == number
            batch[rows] = self._gather(number, samples[rows] - self._first[number])
        tokens, targets = torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:])
        if self.keep_tail:
            tokens = tokens.clamp(min=0)  # -100 is no token
        return tokens.contiguous(), targets.contiguous()

    def _gather(self, number: int, samples: np.ndarray) -> np.ndarray:
        """Windows of one file, (b, T+1); short ones are filled with -100."""
        file, windows = self.files[number], self._open(number)
        short = samples == len(windows)
        if not short.any():
            rows = windows[samples]
            self._check(file, rows, samples)
            return rows
        rows = np.full((len(samples), self.seq_len + 1), IGNORE, dtype=np.int64)
        rows[~short] = windows[samples[~short]]
        tail = file.map()[len(windows) * self.seq_len :]
        rows[short, : len(tail)] = tail
        self._check(file, rows, samples)
        return rows

    def _check(self, file: TokenFile, rows: np.ndarray, samples: np.ndarray) -> None:
        if self.vocab_size is not None and rows.size and rows.max() >= self.vocab_size:
            row = int(np.argmax(rows.max(axis=1) >= self.vocab_size))
            check_tokens(rows[row], self.vocab_size, file.path, int(samples[row]) * self.seq_len)

    def _open(self, number: int) -> np.ndarray:
        """All full windows of a file as one view of its memory map, (windows, T+1)."""
        if number not in self._windows:
            tokens = np.asarray(self.files[number].map())
            if len(tokens) > self.seq_len:
                view = np.lib.stride_tricks.sliding_window_view(tokens, self.seq_len + 1)
                self._windows[number] = view[:: self.seq_len]
            else:
                self._windows[number] = np.empty((0, self.seq_len + 1), tokens.dtype)
        return self._windows[number]

    def __getstate__(self) -> dict:
        """A worker gets the files' names and maps them itself; a pickled map would be a copy."""
        return {**self.__dict__, "_windows": {}}

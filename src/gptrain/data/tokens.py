"""Token files as a data set: windows of tokens, gathered from memory maps.

# B batch, T seq_len
"""

import os
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gptrain.data.samples import IGNORE, BatchDataset
from gptrain.data.token_files import count_windows, find_token_files, hash_files, open_token_file
from gptrain.small_files import DataError


class TokenDataset(BatchDataset):
    """One or many token files; sample i is T tokens in a row and the T that follow one later.

    Windows overlap by the one token that is target here and input there, and never cross a file.

    Args:
        path: a file, a glob pattern, or a list of either.   seq_len: T.
        dtype: of raw files, uint16 or uint32; one with a header says it itself.
        vocab_size: tokens at or above it are a DataError that names file and place: sampled
            now, and exactly in each batch that is read. None: no check.
        keep_tail: the last tokens of a file, too few for a window, make one all the same, filled
            up with targets -100; then every token but a file's first is a target exactly once.
    Raises: FileNotFoundError; DataError for files that are damaged or hold no window at all.
    """

    def __init__(
        self,
        path: str | os.PathLike | Sequence[str | os.PathLike],
        seq_len: int,
        dtype: str = "uint16",
        vocab_size: int | None = None,
        keep_tail: bool = False,
    ) -> None:
        self.files = [open_token_file(file, dtype) for file in find_token_files(path)]
        self.seq_len, self.vocab_size = seq_len, vocab_size
        lengths = [count_windows(file.n_tokens, seq_len, keep_tail) for file in self.files]
        self._first = np.cumsum([0, *lengths])  # (files + 1,) first window of each file
        self._maps: dict[int, np.ndarray] = {}
        if not len(self):
            n_tokens = sum(file.n_tokens for file in self.files)
            raise DataError(
                f"{self.files[0].path}: {n_tokens} tokens; need at least seq_len+1 = {seq_len + 1}"
            )
        if vocab_size is not None:
            for file in self.files:
                for start, tokens in file.samples():
                    file.check(tokens, vocab_size, start)

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same tokens."""
        return hash_files(self.files)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A whole batch in one gather per file: tokens (B, T) and targets (B, T), int64."""
        samples = np.asarray(indices, dtype=np.int64)  # (B,)
        owners = np.searchsorted(self._first, samples, side="right") - 1
        batch = np.empty((len(samples), self.seq_len + 1), dtype=np.int64)  # (B, T+1)
        for number in np.unique(owners).tolist():
            rows = owners == number
            batch[rows] = self._gather(number, samples[rows] - self._first[number])
        tokens, targets = torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:])
        return tokens.clamp(min=0), targets.contiguous()  # -100 is no token

    def _gather(self, number: int, windows: np.ndarray) -> np.ndarray:
        """Windows of one file, (b, T+1); what is beyond its end is -100."""
        file = self.files[number]
        if number not in self._maps:
            self._maps[number] = file.map()
        places = windows[:, None] * self.seq_len + np.arange(self.seq_len + 1)  # (b, T+1)
        rows = self._maps[number][np.minimum(places, file.n_tokens - 1)].astype(np.int64)
        if self.vocab_size is not None and rows.max() >= self.vocab_size:
            for row, first in zip(rows, places[:, 0].tolist(), strict=True):
                file.check(row, self.vocab_size, first)
        rows[places >= file.n_tokens] = IGNORE
        return rows

    def __getstate__(self) -> dict:
        """A worker gets the files' names and maps them itself; a pickled map would be a copy."""
        return {**self.__dict__, "_maps": {}}

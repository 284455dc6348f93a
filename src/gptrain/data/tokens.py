"""Token files and prepared text as data sets: windows of tokens, gathered from memory maps.

# B batch, T seq_len
"""

import os
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gptrain.data import DataError
from gptrain.data.cache import PreparedText, check_prepared
from gptrain.data.order import IGNORE
from gptrain.data.prepare import Paths, prepare_text
from gptrain.data.token_files import (
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
        self.seq_len, self.vocab_size, self.token_bytes = seq_len, vocab_size, token_bytes
        for file in self.files:
            check_prepared(file.path)
            if vocab_size is not None:
                sample_tokens(file, vocab_size)
        lengths = [count_windows(file.n_tokens, seq_len, keep_tail) for file in self.files]
        self._first = np.cumsum([0, *lengths])  # (files + 1,) first window of each file
        self._maps: dict[int, np.ndarray] = {}
        if not len(self):
            n_tokens = sum(file.n_tokens for file in self.files)
            raise DataError(
                f"{self.files[0].path}: {n_tokens} tokens; need at least seq_len+1 = {seq_len + 1}"
            )

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same tokens."""
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
        for number in np.unique(owners).tolist():
            rows = owners == number
            batch[rows] = self._gather(number, samples[rows] - self._first[number])
        tokens, targets = torch.from_numpy(batch[:, :-1]), torch.from_numpy(batch[:, 1:])
        return tokens.clamp(min=0), targets.contiguous()  # -100 is no token

    def _gather(self, number: int, windows: np.ndarray) -> np.ndarray:
        """Windows of one file, (b, T+1); what is beyond its end is -100."""
        if number not in self._maps:
            self._maps[number] = self.files[number].map()
        file, tokens = self.files[number], self._maps[number]
        places = windows[:, None] * self.seq_len + np.arange(self.seq_len + 1)  # (b, T+1)
        rows = np.asarray(tokens[np.minimum(places, file.n_tokens - 1)], dtype=np.int64)
        if self.vocab_size is not None and rows.max() >= self.vocab_size:
            row = int(np.argmax(rows.max(axis=1) >= self.vocab_size))
            check_tokens(rows[row], self.vocab_size, file.path, int(places[row, 0]))
        rows[places >= file.n_tokens] = IGNORE
        return rows

    def __getstate__(self) -> dict:
        """A worker gets the files' names and maps them itself; a pickled map would be a copy."""
        return {**self.__dict__, "_maps": {}}


class TextDataset(TokenDataset):
    """Windows of one part of a prepared text; `val` keeps its tail, so that every byte counts.

    Attributes:
        fingerprint: the same for the same text, tokenizer and split.
        tokenizer: what made the tokens.
    """

    def __init__(self, prepared: PreparedText, split: str, seq_len: int) -> None:
        if split not in ("train", "val"):
            raise ValueError(f"split={split}: must be one of train, val")
        self.tokenizer = prepared.tokenizer()
        super().__init__(
            prepared.folder / f"{split}.bin",
            seq_len,
            prepared.dtype,
            prepared.vocab_size,
            keep_tail=split == "val",
            token_bytes=self.tokenizer.token_bytes,
        )
        self.fingerprint = prepared.folder.name

    @classmethod
    def from_corpus(
        cls,
        split: str,
        seq_len: int,
        path: Paths,
        tokenizer: str,
        cache_dir: str | os.PathLike,
        val_fraction: float = 0.05,
        pattern: str = "*",
        vocab_size: int | None = None,
    ) -> "TextDataset":
        """One part of a corpus, from the cache or prepared now; arguments as for `prepare_text`."""
        prepared = prepare_text(path, tokenizer, cache_dir, val_fraction, pattern, vocab_size)
        return cls(prepared, split, seq_len)

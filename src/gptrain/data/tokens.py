"""TokenDataset: samples from memory-mapped files of tokens, which are never read as a whole.

# B batch, T seq_len
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gptrain.core.errors import DataError
from gptrain.data.samples import BatchDataset
from gptrain.data.token_files import TokenFile, find_token_files, open_token_file
from gptrain.loss import IGNORED

# Blocks of 2^14 tokens that are checked when a dataset is opened. A single file is checked
# completely if it has at most 2^18 tokens, 512 KiB of uint16.
_CHECKED_BLOCKS = 16


class TokenDataset(BatchDataset):
    """Dataset that cuts token files into windows of T tokens, with the next tokens as targets.

    Sample i is window i, counted over all files. The last target of a window is the first token of
    the next window. Windows never cross the end of a file.

    Args:
        path: File, glob pattern, folder of .bin files, or a list of these.
        seq_len: Positions of a sample, T.
        dtype: Type of the tokens in raw files, uint16 or uint32. Files with a header or an index
            have their own type.
        vocab_size: Number of tokens of the vocabulary. A token id that is not below it raises a
            DataError with the file and the position. A sample of the tokens is checked when the
            dataset is opened, and every batch when it is read. None does not check.
        keep_tail: Whether the last tokens of a file that do not fill a window make one more sample,
            padded with targets -100. Every token except the first of each file is then a target
            exactly once.
        split: "train" or "val" leaves out the files of a folder that belong to another split by
            their own name or a folder's name. An empty text takes all files.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If a file or a folder cannot be read.
        DataError: If a file is damaged, or if the files hold no window at all.
    """

    def __init__(
        self,
        path: str | os.PathLike | Sequence[str | os.PathLike],
        seq_len: int,
        dtype: str = "uint16",
        vocab_size: int | None = None,
        keep_tail: bool = False,
        split: str = "",
    ) -> None:
        self.files = [open_token_file(file, dtype) for file in find_token_files(path, split)]
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        lengths = [count_windows(file.n_tokens, seq_len, keep_tail) for file in self.files]
        self._firsts = np.cumsum([0, *lengths])  # (files + 1,) first window of each file
        self._maps: dict[int, np.ndarray] = {}
        if not len(self):
            n_tokens = sum(file.n_tokens for file in self.files)
            message = f"{n_tokens} tokens; need at least seq_len+1 = {seq_len + 1}"
            raise DataError(f"{self.files[0].path}: {message}")
        for file, positions, tokens in self._checked_blocks():
            file.check_tokens(tokens, positions, vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the files' token types and lengths, and of a sample of their tokens.

        A resumed run compares it, to notice that it would train on other data. The paths of the
        files are not part of the hash.
        """
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.dtype} {file.n_tokens};".encode())
        for _, _, block in self._checked_blocks():
            digest.update(block.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a batch: tokens (B, T) and targets (B, T), int64. Each file is indexed once.

        Args:
            indices: Numbers of windows, (B,), counted over all files.

        Raises:
            DataError: If a token id is not below `vocab_size`.
        """
        samples = np.asarray(indices, dtype=np.int64)  # (B,)
        owners = np.searchsorted(self._firsts, samples, side="right") - 1
        batch = np.empty((len(samples), self.seq_len + 1), dtype=np.int64)  # (B, T+1)
        for number in np.unique(owners).tolist():
            rows = owners == number
            batch[rows] = self._gather(number, samples[rows] - self._firsts[number])
        tokens = torch.from_numpy(batch[:, :-1])
        targets = torch.from_numpy(batch[:, 1:])
        return tokens.clamp(min=0), targets.contiguous()  # -100 is not a token id

    def describe(self, n_samples: int = 0) -> str:
        """Return a line with the number of tokens, and the number of epochs of a run.

        Args:
            n_samples: Number of samples that the run reads. 0 leaves out the epochs.
        """
        n_tokens = sum(file.n_tokens for file in self.files)
        n_epochs = f" · {n_samples / len(self):.3g} epochs" if n_samples else ""
        return f"{n_tokens:,} tokens{n_epochs}"

    def _checked_blocks(self) -> Iterator[tuple[TokenFile, np.ndarray, np.ndarray]]:
        """Yield a sample of the tokens: blocks as (file, positions (n,), tokens (n,)).

        The blocks are spread evenly over all files, or over 16 of them if there are more files.
        They are checked when the dataset is opened, and are a part of the fingerprint.
        """
        n_files = min(len(self.files), _CHECKED_BLOCKS)
        n_blocks = -(-_CHECKED_BLOCKS // n_files)  # blocks of each file, rounded up
        for number in np.linspace(0, len(self.files) - 1, n_files).astype(int).tolist():
            file = self.files[number]
            for positions in file.sample_positions(n_blocks):
                yield file, positions, file.map()[positions]

    def _gather(self, number: int, windows: np.ndarray) -> np.ndarray:
        """Read windows of one file, each with the target after its last token, (b, T+1) int64.

        Positions at or after the limit of a window, such as the end of the file, are -100.

        Args:
            number: Number of the file in `files`.
            windows: Numbers of windows, (b,), counted within this file.

        Raises:
            DataError: If a token id is not below `vocab_size`.
        """
        file = self.files[number]
        if number not in self._maps:
            self._maps[number] = file.map()
        positions, ends = self._window_positions(number, windows)  # (b, T+1), (b,)
        tokens = self._maps[number][np.minimum(positions, ends[:, None] - 1)].astype(np.int64)
        file.check_tokens(tokens, positions, self.vocab_size)
        tokens[positions >= ends[:, None]] = IGNORED
        return tokens

    def _window_positions(self, number: int, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which positions of a file are read for some windows, and where each window ends.

        Args:
            number: Number of the file in `files`.
            windows: Numbers of windows, (b,), counted within this file.

        Returns:
            Positions (b, T+1) of the T tokens of each window and the target after the last one; and
            limits (b,): the end of the file, or in a subclass the end of a document. Tokens at or
            after a limit are not read, and are targets of -100.
        """
        positions = windows[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return positions, np.full(len(windows), self.files[number].n_tokens)

    def __getstate__(self) -> dict:
        """Return the attributes for pickle, without memory maps.

        Pickling a map would copy the file's content. A DataLoader worker maps the files again.
        """
        return {**self.__dict__, "_maps": {}}


def token_dtype(vocab_size: int) -> str:
    """Return the smallest dtype that holds the tokens of a vocabulary, "uint16" or "uint32"."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def count_windows(n_tokens: int, seq_len: int, keep_tail: bool = False) -> int:
    """Return into how many windows of `seq_len` positions a file of `n_tokens` tokens is cut.

    Each token except the first is a target in one window, as far as the windows reach.

    Args:
        n_tokens: Number of tokens of a file.
        seq_len: Positions of a window.
        keep_tail: Whether a last window with fewer than `seq_len` targets counts.
    """
    n_targets = n_tokens - 1
    return -(-n_targets // seq_len) if keep_tail else n_targets // seq_len

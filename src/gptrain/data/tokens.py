"""Ready tokens as a data set: windows of memory-mapped files, of which nothing is read whole.

# B batch, T seq_len
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gptrain.core.small_files import DataError
from gptrain.data.samples import BatchDataset
from gptrain.data.token_files import TokenFile, find_token_files, open_token_file
from gptrain.loss import IGNORED

_SAMPLE_BLOCKS = 16  # of 2^14 tokens that are looked at when opened: all of a file below 512 KiB


class TokenDataset(BatchDataset):
    """One or many token files; sample i is T tokens in a row and the T that follow one later.

    Windows overlap by the one token that is target here and input there, and never cross a file.

    Args:
        path: a file, a glob pattern, a folder of .bin files, or a list of them.   seq_len: T.
        dtype: of raw files, uint16 or uint32; one with a header says it itself.
        vocab_size: tokens at or above it are a DataError that names file and place: sampled
            now, and exactly in each batch that is read. None: no check.
        keep_tail: the last tokens of a file, too few for a window, make one all the same, filled
            up with targets -100; then every token but a file's first is a target exactly once.
        split: train or val: which files of a folder are meant.
    Raises: FileNotFoundError; DataError for files that are damaged or hold no window at all.
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
        self.seq_len, self.vocab_size = seq_len, vocab_size
        lengths = [count_windows(file.n_tokens, seq_len, keep_tail) for file in self.files]
        self._first = np.cumsum([0, *lengths])  # (files + 1,) first window of each file
        self._maps: dict[int, np.ndarray] = {}
        if not len(self):
            n_tokens = sum(file.n_tokens for file in self.files)
            raise DataError(
                f"{self.files[0].path}: {n_tokens} tokens; need at least seq_len+1 = {seq_len + 1}"
            )
        for file, places, tokens in self._blocks():
            file.check(tokens, places, vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """One hash of what the files hold, wherever they lie: of sizes and of samples."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.dtype} {file.n_tokens};".encode())
        for _, _, block in self._blocks():
            digest.update(block.tobytes())
        return digest.hexdigest()

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

    def about(self, n_samples: int = 0) -> str:
        """What the samples are made of, and how often a run of so many sees them."""
        n_tokens = sum(file.n_tokens for file in self.files)
        n_epochs = f" · {n_samples / len(self):.3g} epochs" if n_samples else ""
        return f"{n_tokens:,} tokens{n_epochs}"

    def _blocks(self) -> Iterator[tuple[TokenFile, np.ndarray, np.ndarray]]:
        """Some of all tokens and their places, evenly from all files; of many files a few."""
        n_files = min(len(self.files), _SAMPLE_BLOCKS)
        for number in np.linspace(0, len(self.files) - 1, n_files).astype(int).tolist():
            file = self.files[number]
            for places in file.samples(-(-_SAMPLE_BLOCKS // n_files)):
                yield file, places, file.map()[places]

    def _gather(self, number: int, windows: np.ndarray) -> np.ndarray:
        """Windows of one file, (b, T+1); what is beyond their ends is -100."""
        file = self.files[number]
        if number not in self._maps:
            self._maps[number] = file.map()
        places, ends = self._places(number, windows)  # (b, T+1), (b,)
        rows = self._maps[number][np.minimum(places, ends[:, None] - 1)].astype(np.int64)
        file.check(rows, places, self.vocab_size)
        rows[places >= ends[:, None]] = IGNORED
        return rows

    def _places(self, number: int, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places in the file of windows and the target after each, (b, T+1), and their ends."""
        places = windows[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return places, np.full(len(windows), self.files[number].n_tokens)

    def __getstate__(self) -> dict:
        """A worker gets the files' names and maps them itself; a pickled map would be a copy."""
        return {**self.__dict__, "_maps": {}}


def token_dtype(vocab_size: int) -> str:
    """The dtype in which tokens of a vocabulary are stored."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def count_windows(n_tokens: int, seq_len: int, keep_tail: bool = False) -> int:
    """Windows of seq_len tokens and their targets in n_tokens; `keep_tail`: with a short one.

    Windows overlap by one token, so that each token but the first is a target once.
    """
    n_targets = n_tokens - 1
    return -(-n_targets // seq_len) if keep_tail else n_targets // seq_len

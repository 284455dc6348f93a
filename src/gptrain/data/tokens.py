"""Ready token files as a data set: raw uint16/uint32, or as llm.c writes them, memory-mapped.

A raw file (nanoGPT's train.bin) is nothing but tokens. llm.c puts 256 int32 in front of them:
magic, version, count, zeros. Nothing here reads a file whole.

# B batch, T seq_len
"""

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gptrain.data.samples import IGNORE, BatchDataset
from gptrain.small_files import DataError, open_regular

HEADER_BYTES = 1024  # 256 int32
# magic: (version, dtype), as in dev/data/data_common.py of karpathy/llm.c (GPT-2, Llama 3)
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
_SAMPLE_BLOCKS, _SAMPLE_TOKENS = 16, 2**14  # looked at when opened: all of a file below 512 KiB


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
        """One hash of what the files hold, wherever they lie: of sizes and of samples."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.dtype} {file.n_tokens};".encode())
            for _, block in file.samples():
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


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens: where they begin, how many, and how wide."""

    path: Path
    dtype: str  # uint16 or uint32
    n_tokens: int
    offset_bytes: int  # of the first token

    def map(self) -> np.ndarray:
        """The tokens as a read-only memory map, (n_tokens,)."""
        return np.memmap(self.path, self.dtype, "r", self.offset_bytes, (self.n_tokens,))

    def samples(self) -> Iterator[tuple[int, np.ndarray]]:
        """Blocks from end to end of the file, each with the place of its first token."""
        tokens = self.map()
        last = max(0, self.n_tokens - _SAMPLE_TOKENS)
        for start in np.unique(np.linspace(0, last, _SAMPLE_BLOCKS).astype(np.int64)).tolist():
            yield start, tokens[start : start + _SAMPLE_TOKENS]

    def check(self, tokens: np.ndarray, vocab_size: int, start: int) -> None:
        """Raises DataError if one of its tokens is outside the vocabulary.

        Args:
            tokens: some in a row.   start: the place of the first one.
        """
        if tokens.max() >= vocab_size:
            where = int(np.argmax(tokens >= vocab_size))
            raise DataError(
                f"{self.path}: token {tokens[where]} at offset {start + where} (in tokens)"
                f" >= vocab_size={vocab_size}"
            )


def token_dtype(vocab_size: int) -> str:
    """The dtype in which tokens of a vocabulary are stored."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def find_token_files(path: str | os.PathLike | Sequence[str | os.PathLike]) -> list[Path]:
    """The files that a path, a glob pattern, or a list of them names; sorted within a pattern.

    Raises: FileNotFoundError if a name or pattern matches nothing.
    """
    if not isinstance(path, (str, os.PathLike)):
        return [file for one in path for file in find_token_files(one)]
    pattern = os.path.expanduser(path)
    found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise FileNotFoundError(f"{path}: no such file")
    return [Path(file) for file in found]


def open_token_file(path: str | os.PathLike, dtype: str = "uint16") -> TokenFile:
    """What a token file holds, from its header or, if raw, from its size; no token is read.

    Args:
        dtype: of the tokens of a raw file, `uint16` or `uint32`; a header says it itself.
    Raises: FileNotFoundError; DataError for what is no regular file, an empty one, an odd size,
        a header of another version, a count that does not match the size.
    """
    with open_regular(path) as file:
        size_bytes, head = os.fstat(file.fileno()).st_size, file.read(HEADER_BYTES)
    words = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4").tolist()
    offset_bytes = 0
    if words and words[0] in _HEADERS:
        version, dtype = _HEADERS[words[0]]
        if words[1:2] != [version] or len(head) < HEADER_BYTES:
            raise DataError(f"{path}: truncated header, or not of version {version}")
        offset_bytes = HEADER_BYTES
    n_tokens, rest_bytes = divmod(size_bytes - offset_bytes, np.dtype(dtype).itemsize)
    if offset_bytes and (n_tokens, rest_bytes) != (words[2], 0):
        raise DataError(
            f"{path}: its header counts {words[2]} tokens of {dtype},"
            f" {size_bytes - offset_bytes} bytes follow"
        )
    if rest_bytes:
        raise DataError(
            f"{path}: {size_bytes} bytes are no integer number of {dtype} tokens;"
            " truncated, or of another dtype"
        )
    if n_tokens == 0:
        raise DataError(f"{path}: 0 tokens; need at least seq_len+1")
    return TokenFile(Path(path), dtype, n_tokens, offset_bytes)


def count_windows(n_tokens: int, seq_len: int, keep_tail: bool = False) -> int:
    """Windows of seq_len tokens and their targets in n_tokens that follow each other.

    They overlap by one token, so that each token but the first is a target once. The last, short
    one counts with `keep_tail`.
    """
    n_targets = n_tokens - 1
    return -(-n_targets // seq_len) if keep_tail else n_targets // seq_len

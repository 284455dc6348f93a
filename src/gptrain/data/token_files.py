"""Ready token files, known by their headers: raw uint16/uint32, or as llm.c writes them.

A raw file (nanoGPT's train.bin) is nothing but tokens. llm.c puts 256 int32 in front of them:
magic, version, count, zeros. Nothing here reads a file whole.
"""

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptrain.small_files import DataError, open_regular

HEADER_BYTES = 1024  # 256 int32
# magic: (version, dtype), as in dev/data/data_common.py of karpathy/llm.c (GPT-2, Llama 3)
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
_SAMPLE_BLOCKS, _SAMPLE_TOKENS = 16, 2**14  # looked at when opened: all of a file below 512 KiB


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


def hash_files(files: Sequence[TokenFile]) -> str:
    """One hash of what files hold, wherever they lie: of sizes and of samples."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.dtype} {file.n_tokens};".encode())
        for _, block in file.samples():
            digest.update(block.tobytes())
    return digest.hexdigest()

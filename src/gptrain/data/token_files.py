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

from gptrain.data import DataError

HEADER_BYTES = 1024  # 256 int32
# magic: (version, dtype), as in dev/data/data_common.py of karpathy/llm.c (GPT-2, Llama 3)
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
_DTYPES = ("uint16", "uint32")
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


def find_token_files(path: str | os.PathLike | Sequence[str | os.PathLike]) -> list[Path]:
    """The files that a path, a glob pattern, or a list of them names; sorted within a pattern.

    Raises: FileNotFoundError if a name or pattern matches nothing; DataError for a folder.
    """
    if not isinstance(path, (str, os.PathLike)):
        return [file for one in path for file in find_token_files(one)]
    pattern = os.path.expanduser(path)
    found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise FileNotFoundError(f"{path}: no such file")
    for file in found:
        if os.path.isdir(file):
            raise DataError(f"{file}: a folder; name its files: {file.rstrip('/')}/*.bin")
    return [Path(file) for file in found]


def open_token_file(path: str | os.PathLike, dtype: str | None = None) -> TokenFile:
    """What a token file holds, from its header or, if raw, from its size; no token is read.

    Args:
        dtype: of the tokens, `uint16` or `uint32`; needed for raw files. A header says it
            itself and must agree.
    Raises: FileNotFoundError; DataError for an empty file, an odd size, an unknown header, a
        count that does not match the size, a header of another dtype.
    """
    if dtype not in (None, *_DTYPES):
        raise ValueError(f"dtype={dtype}: must be one of {', '.join(_DTYPES)}")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():  # a named pipe would block for ever
        raise DataError(f"{path}: not a regular file")
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        words = np.frombuffer(file.read(HEADER_BYTES)[: size_bytes // 4 * 4], dtype="<i4")
    offset_bytes = 0
    if _is_header(words):
        dtype, offset_bytes = _header_dtype(path, words, dtype), HEADER_BYTES
    elif size_bytes and dtype is None:
        raise DataError(f"{path}: no header; say how wide its tokens are: uint16 or uint32")
    n_tokens, rest_bytes = divmod(size_bytes - offset_bytes, np.dtype(dtype).itemsize)
    if offset_bytes and (n_tokens != words[2] or rest_bytes):
        raise DataError(
            f"{path}: its header counts {words[2]} tokens of {dtype}, {size_bytes - offset_bytes}"
            f" bytes follow, that is {n_tokens}" + f" and {rest_bytes} bytes" * (rest_bytes > 0)
        )
    if rest_bytes:
        raise DataError(
            f"{path}: {size_bytes} bytes are no integer number of {dtype} tokens;"
            " truncated, or of another dtype"
        )
    if n_tokens == 0:
        raise DataError(f"{path}: 0 tokens; need at least seq_len+1")
    return TokenFile(path, dtype, n_tokens, offset_bytes)


def count_windows(n_tokens: int, seq_len: int, keep_tail: bool = False) -> int:
    """Windows of seq_len tokens and their targets in n_tokens that follow each other.

    They overlap by one token, so that each token but the first is a target once. The last, short
    one counts with `keep_tail`.
    """
    n_targets = max(0, n_tokens - 1)
    return -(-n_targets // seq_len) if keep_tail else n_targets // seq_len


def sample_tokens(file: TokenFile, vocab_size: int) -> None:
    """Looks at samples of a file: finds a wrong vocabulary or dtype, cheaply.

    Raises: DataError that names the first token >= vocab_size in them and its place.
    """
    for start, block in file.samples():
        check_tokens(block, vocab_size, file.path, start)


def check_tokens(tokens: np.ndarray, vocab_size: int, path: Path, start: int) -> None:
    """Raises DataError if a token is outside the vocabulary; `start` is the first one's place."""
    if tokens.size and tokens.max() >= vocab_size:
        where = int(np.argmax(tokens >= vocab_size))
        raise DataError(
            f"{path}: token {tokens[where]} at offset {start + where} (in tokens)"
            f" >= vocab_size={vocab_size}"
        )


def hash_files(files: Sequence[TokenFile]) -> str:
    """One hash of what files hold, wherever they lie: of sizes and of samples."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.dtype} {file.n_tokens};".encode())
        for _, block in file.samples():
            digest.update(block.tobytes())
    return digest.hexdigest()


def _is_header(words: np.ndarray) -> bool:
    """Whether 256 int32 are a header of llm.c's kind, known or not.

    It is nothing but zeros after its first words, which text of 500 tokens never is. A known
    magic is a header whatever follows.
    """
    if words.size and int(words[0]) in _HEADERS:
        return True
    return words.size == 256 and words[0] != 0 and not words[4:].any()


def _header_dtype(path: Path, words: np.ndarray, dtype: str | None) -> str:
    if words.size < 256:
        raise DataError(f"{path}: truncated within its header")
    magic, version = int(words[0]), int(words[1])
    if magic not in _HEADERS:
        raise DataError(f"{path}: header with magic {magic}; known are {sorted(_HEADERS)}")
    known_version, known_dtype = _HEADERS[magic]
    if version != known_version:
        raise DataError(f"{path}: header {magic} of version {version}; known is {known_version}")
    if dtype not in (None, known_dtype):
        raise DataError(f"{path}: its header says {known_dtype}, not {dtype}")
    return known_dtype

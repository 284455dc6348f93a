"""Files of tokens: which there are, and what their headers say. No token is read to find out.

- raw (nanoGPT's train.bin): nothing but tokens;
- llm.c: 256 int32 in front of them: magic, version, count, zeros;
- Megatron: raw tokens in x.bin, and what they are in x.idx (megatron/core/datasets/indexed_dataset
  of NVIDIA/Megatron-LM).
"""

import glob
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptrain.core.small_files import DataError, open_regular
from gptrain.data.folders import SkippedPaths, walk_files

HEADER_BYTES = 1024  # 256 int32
# magic: (version, dtype), as in dev/data/data_common.py of karpathy/llm.c (GPT-2, Llama 3)
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
_MEGATRON = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents
_MEGATRON_TYPES = {8: "uint16", 4: "uint32"}  # 4 is int32, of tokens that are not negative
_SAMPLE_TOKENS = 2**14
_OTHER_SPLITS = {"train": ("val", "test"), "val": ("train", "test")}


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

    def sample_positions(self, n_blocks: int) -> Iterator[np.ndarray]:
        """Places of the tokens in blocks from end to end of the file, (n,) each."""
        last = max(0, self.n_tokens - _SAMPLE_TOKENS)
        for start in np.unique(np.linspace(0, last, n_blocks).astype(np.int64)).tolist():
            yield np.arange(start, min(start + _SAMPLE_TOKENS, self.n_tokens))

    def check_tokens(self, tokens: np.ndarray, places: np.ndarray, vocab_size: int | None) -> None:
        """Raises DataError if one of these tokens, at these places, is outside the vocabulary."""
        if vocab_size is not None and tokens.max() >= vocab_size:
            first = np.argmax(tokens >= vocab_size)
            raise DataError(
                f"{self.path}: token {tokens.flat[first]} at offset {places.flat[first]}"
                f" (in tokens) >= vocab_size={vocab_size}"
            )


def find_token_files(
    path: str | os.PathLike | Sequence[str | os.PathLike], split: str = ""
) -> list[Path]:
    """Return the files that a path, a glob pattern, or a list of them names, each glob's sorted.

    Args:
        split: train or val: of the `.bin` files below a folder, those whose name or folders do not
            say that they are of another split. Links to files and folders are followed.

    Raises:
        FileNotFoundError: If a name, pattern or folder has no such file.
    """
    if not isinstance(path, (str, os.PathLike)):
        return [file for one in path for file in find_token_files(one, split)]
    pattern = os.path.expanduser(path)
    names = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
    found = []
    for name in names:
        if os.path.isdir(name):
            found += _find_below(name, split)
        elif not name.endswith(".idx"):  # which lies beside its .bin
            found.append(Path(name))
    if not found:
        is_folder = os.path.isdir(pattern)
        what = f"*.bin for {split or 'tokens'} in it" if is_folder else "such file"
        raise FileNotFoundError(f"{path}: no {what}")
    return found


def _find_below(folder: str, split: str) -> list[Path]:
    """Return the `.bin` files below a folder that are of a split, sorted by name."""
    skipped = SkippedPaths()
    files = [one for one in walk_files(folder, skipped) if one.name.endswith(".bin")]
    skipped.warn()
    first = {one.real_path: one for one in sorted(files, reverse=True)}  # each file once
    return [
        Path(folder, one.name)
        for one in sorted(first.values())
        if not any(_says(one.name, other) for other in _OTHER_SPLITS.get(split, ()))
    ]


def _says(name: str, split: str) -> bool:
    """Return whether a file's name contains the name of a split, or a folder of it is called so."""
    *folders, file = name.split("/")
    return split in file or split in folders


def open_token_file(path: str | os.PathLike, dtype: str = "uint16") -> TokenFile:
    """What a token file holds, from its header, its index or, if raw, from its size.

    Args:
        dtype: of the tokens of a raw file, `uint16` or `uint32`; a header says it itself.
    Raises: FileNotFoundError; DataError for what is no regular file, an empty one, an odd size,
        a header of another version, a count that does not match the size.
    """
    path, counted, offset_bytes = Path(path), None, 0
    with open_regular(path) as file:
        size_bytes, head = os.fstat(file.fileno()).st_size, file.read(HEADER_BYTES)
    magic, version, count = np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), "<i4")[:3].tolist()
    if path.with_suffix(".idx").is_file():
        dtype, counted = read_megatron_index(path.with_suffix(".idx"))
    elif magic in _HEADERS:
        known, dtype = _HEADERS[magic]
        if version != known or size_bytes < HEADER_BYTES:
            raise DataError(f"{path}: truncated header, or not of version {known}")
        counted, offset_bytes = count, HEADER_BYTES
    n_bytes = size_bytes - offset_bytes
    n_tokens, rest_bytes = divmod(n_bytes, np.dtype(dtype).itemsize)
    if counted is not None and (n_tokens, rest_bytes) != (counted, 0):
        message = f"its header counts {counted} tokens of {dtype}, {n_bytes} bytes follow"
    elif rest_bytes:
        message = f"{n_bytes} bytes are no integer number of {dtype} tokens"
        message += "; truncated, or of another dtype"
    elif n_tokens == 0:
        message = "0 tokens; need at least seq_len+1"
    else:
        return TokenFile(path, dtype, n_tokens, offset_bytes)
    raise DataError(f"{path}: {message}")


def read_megatron_index(path: Path) -> tuple[str, int]:
    """Dtype and number of the tokens that a Megatron index counts.   Raises: DataError.

    After the header stand the length of each sequence (int32), its place in bytes (int64), and
    the documents' first sequences; the last sequence's end is the number of all tokens.
    """
    with open_regular(path) as file:
        head = file.read(_MEGATRON.size).ljust(_MEGATRON.size, b"\0")
        magic, version, code, n_sequences, n_documents = _MEGATRON.unpack(head)
        size_bytes = _MEGATRON.size + 12 * n_sequences + 8 * n_documents
        if magic != b"MMIDIDX\0\0" or version != 1:
            raise DataError(f"{path}: no Megatron index of version 1")
        if code not in _MEGATRON_TYPES:
            raise DataError(f"{path}: tokens of type {code}; read are 8 (uint16) and 4 (int32)")
        if not n_sequences or os.fstat(file.fileno()).st_size < size_bytes:
            raise DataError(f"{path}: truncated, or without a sequence")
    places = _MEGATRON.size + 4 * n_sequences
    last = np.fromfile(path, "<i4", 1, offset=places - 4)[0]
    place = np.fromfile(path, "<i8", 1, offset=places + 8 * (n_sequences - 1))[0]
    dtype = _MEGATRON_TYPES[code]
    return dtype, int(place) // np.dtype(dtype).itemsize + int(last)

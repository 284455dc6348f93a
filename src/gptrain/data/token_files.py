"""Token files: how they are found, and how their token type and length are read.

There are three formats:

- Raw (train.bin of nanoGPT): The file consists of tokens only.
- llm.c: 256 int32 precede the tokens: magic number, version, number of tokens, zeros.
- Megatron: Raw tokens are in x.bin, and their type and number in x.idx (source:
  megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM).
"""

import glob
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptrain.core.errors import DataError
from gptrain.core.small_files import open_regular
from gptrain.data.folders import SkippedPaths, walk_files

HEADER_BYTES = 1024  # 256 int32
# Magic number -> (version, dtype), as in dev/data/data_common.py of karpathy/llm.c (GPT-2, Llama 3)
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
# Magic text, version, code of the dtype, number of sequences, number of documents
_MEGATRON = struct.Struct("<9sQBQQ")
# Code -> dtype. Code 4 is int32. Token ids are not negative, so uint32 reads the same values.
_MEGATRON_TYPES = {8: "uint16", 4: "uint32"}
_SAMPLE_TOKENS = 2**14
_OTHER_SPLITS = {"train": ("val", "test"), "val": ("train", "test")}


@dataclass(frozen=True)
class TokenFile:
    """Path and layout of a file of tokens, whose content is not in memory.

    Attributes:
        path: Path of the file.
        dtype: Type of a token: "uint16" or "uint32".
        n_tokens: Number of tokens.
        offset_bytes: Position of the first token in the file.
    """

    path: Path
    dtype: str
    n_tokens: int
    offset_bytes: int

    def map(self) -> np.ndarray:
        """Return a read-only memory map of the tokens, (n_tokens,)."""
        return np.memmap(self.path, self.dtype, "r", self.offset_bytes, (self.n_tokens,))

    def sample_positions(self, n_blocks: int) -> Iterator[np.ndarray]:
        """Yield the positions of blocks of tokens that are spread evenly over the file, (n,) each.

        A block has 2^14 tokens. A short file gives fewer blocks, and a file of less than 2^14
        tokens gives one block with all of its tokens.

        Args:
            n_blocks: Largest number of blocks.
        """
        last = max(0, self.n_tokens - _SAMPLE_TOKENS)
        for start in np.unique(np.linspace(0, last, n_blocks).astype(np.int64)).tolist():
            yield np.arange(start, min(start + _SAMPLE_TOKENS, self.n_tokens))

    def check_tokens(
        self, tokens: np.ndarray, positions: np.ndarray, vocab_size: int | None
    ) -> None:
        """Check that token ids are below the size of the vocabulary.

        Args:
            tokens: Tokens of this file, in any shape.
            positions: Position of each token in the file, in the same shape, for the message.
            vocab_size: Number of tokens of the vocabulary. None checks nothing.

        Raises:
            DataError: If a token id is not below `vocab_size`.
        """
        if vocab_size is not None and tokens.max() >= vocab_size:
            first = np.argmax(tokens >= vocab_size)
            raise DataError(
                f"{self.path}: token {tokens.flat[first]} at offset {positions.flat[first]}"
                f" (in tokens) >= vocab_size={vocab_size}"
            )


def find_token_files(
    path: str | os.PathLike | Sequence[str | os.PathLike], split: str = ""
) -> list[Path]:
    """Return the token files that a path, a glob pattern or a list of these names.

    The files of a glob pattern and of a folder are sorted by name. Index files of Megatron (.idx)
    are left out. Links to files and folders are followed. Warns about paths in folders that are
    skipped, such as links without a target.

    Args:
        path: File, folder, glob pattern or a list of these. Of a folder, the .bin files at any
            depth are taken.
        split: "train" or "val" leaves out the files of a folder that belong to another split,
            because their name contains its name or they are in a folder of its name. An empty text
            takes all files.

    Raises:
        FileNotFoundError: If a path, a pattern or a folder gives no file. An empty list gives an
            empty result instead.
        OSError: If a folder cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        return [file for item in path for file in find_token_files(item, split)]
    pattern = os.path.expanduser(path)
    names = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
    files = []
    for name in names:
        if os.path.isdir(name):
            files += _find_below(name, split)
        elif not name.endswith(".idx"):
            files.append(Path(name))
    if not files:
        is_folder = os.path.isdir(pattern)
        missing = f"*.bin for {split or 'tokens'} in it" if is_folder else "such file"
        raise FileNotFoundError(f"{path}: no {missing}")
    return files


def _find_below(folder: str, split: str) -> list[Path]:
    """Return the .bin files below a folder that do not belong to another split, sorted by name.

    Warns about paths that are skipped, such as links without a target.

    Args:
        folder: Folder that is searched at any depth.
        split: "train" or "val", which leaves out the files of the other splits. An empty text takes
            all files.

    Raises:
        OSError: If the folder cannot be read.
    """
    skipped = SkippedPaths()
    files = [file for file in walk_files(folder, skipped) if file.name.endswith(".bin")]
    skipped.warn()
    # Of several paths to one file, the first in the order of names is taken.
    unique = {file.real_path: file for file in sorted(files, reverse=True)}
    return [
        Path(folder, file.name)
        for file in sorted(unique.values())
        if not any(_belongs_to(file.name, other) for other in _OTHER_SPLITS.get(split, ()))
    ]


def _belongs_to(name: str, split: str) -> bool:
    """Return whether a file belongs to a split.

    This is so if the file's name contains the name of the split, or if one of its folders has the
    name of the split.

    Args:
        name: Path of the file below the searched folder, with slashes.
        split: Name of the split.
    """
    *folders, file = name.split("/")
    return split in file or split in folders


def open_token_file(path: str | os.PathLike, dtype: str = "uint16") -> TokenFile:
    """Return the layout of a token file, from its header, its index or, without these, its size.

    Args:
        path: Path of the file. An index with the suffix .idx in the same folder is read as well.
        dtype: Type of the tokens of a raw file, uint16 or uint32.

    Raises:
        OSError: If the file does not exist or cannot be read.
        DataError: If the file is not a regular file, if it is empty, if it ends inside a token, if
            its header or index has another version, or if the number of tokens does not match the
            size.
    """
    path = Path(path)
    expected_tokens = None  # number of tokens by header or index
    offset_bytes = 0
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        head = file.read(HEADER_BYTES)
    magic, version, count = np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), "<i4")[:3].tolist()
    if path.with_suffix(".idx").is_file():
        dtype, expected_tokens = read_megatron_index(path.with_suffix(".idx"))
    elif magic in _HEADERS:
        known_version, dtype = _HEADERS[magic]
        if version != known_version or size_bytes < HEADER_BYTES:
            raise DataError(f"{path}: truncated header, or not of version {known_version}")
        expected_tokens = count
        offset_bytes = HEADER_BYTES
    n_bytes = size_bytes - offset_bytes
    n_tokens, rest_bytes = divmod(n_bytes, np.dtype(dtype).itemsize)
    if expected_tokens is not None and (n_tokens, rest_bytes) != (expected_tokens, 0):
        message = f"its header counts {expected_tokens} tokens of {dtype}, {n_bytes} bytes follow"
    elif rest_bytes:
        message = f"{n_bytes} bytes are not a whole number of {dtype} tokens"
        message += "; truncated, or of another dtype"
    elif n_tokens == 0:
        message = "0 tokens; need at least seq_len+1"
    else:
        return TokenFile(path, dtype, n_tokens, offset_bytes)
    raise DataError(f"{path}: {message}")


def read_megatron_index(path: Path) -> tuple[str, int]:
    """Return the dtype and the number of all tokens that a Megatron index describes.

    The header is followed by the length of each sequence in tokens (int32), the position of each
    sequence in bytes (int64), and the number of the first sequence of each document (int64). The
    number of all tokens is the end of the last sequence.

    Args:
        path: Path of the index, with the suffix .idx.

    Raises:
        OSError: If the file does not exist or cannot be read.
        DataError: If the file is not an index of version 1, is truncated, has no sequence, or has
            tokens of an unknown type.
    """
    with open_regular(path) as file:
        head = file.read(_MEGATRON.size).ljust(_MEGATRON.size, b"\0")
        magic, version, code, n_sequences, n_documents = _MEGATRON.unpack(head)
        size_bytes = _MEGATRON.size + 12 * n_sequences + 8 * n_documents
        if magic != b"MMIDIDX\0\0" or version != 1:
            raise DataError(f"{path}: not a Megatron index of version 1")
        if code not in _MEGATRON_TYPES:
            raise DataError(f"{path}: tokens of type {code}; allowed: 8 (uint16), 4 (int32)")
        if not n_sequences or os.fstat(file.fileno()).st_size < size_bytes:
            raise DataError(f"{path}: truncated, or without a sequence")
    lengths_end = _MEGATRON.size + 4 * n_sequences
    last_length = np.fromfile(path, "<i4", 1, offset=lengths_end - 4)[0]
    last_position = np.fromfile(path, "<i8", 1, offset=lengths_end + 8 * (n_sequences - 1))[0]
    dtype = _MEGATRON_TYPES[code]
    return dtype, int(last_position) // np.dtype(dtype).itemsize + int(last_length)

"""TokenDataset: samples from memory-mapped files of tokens, which are never read as a whole.

There are four formats:

- Raw (train.bin of nanoGPT): The file consists of tokens only.
- llm.c: 256 int32 precede the tokens: magic number, version, number of tokens, zeros.
- Megatron: Raw tokens are in x.bin, and their type and number in x.idx (source:
  megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM).
- NumPy: An array with one dimension in x.npy.

# B batch, T seq_len
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptrain.core.errors import DataError, first_line
from gptrain.core.small_files import open_regular
from gptrain.data.samples import BatchDataset
from gptrain.data.sources import Paths, find_files
from gptrain.loss import IGNORED

_HEADER_BYTES = 1024  # 256 int32
# Magic number -> (version, dtype), as in dev/data/data_common.py of karpathy/llm.c (GPT-2, Llama 3)
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
# Magic text, version, code of the dtype, number of sequences, number of documents
_MEGATRON = struct.Struct("<9sQBQQ")
# Code -> dtype. Code 4 is int32. Token ids are not negative, so uint32 reads the same values.
_MEGATRON_TYPES = {8: "uint16", 4: "uint32", 5: "int64"}
_SPLITS = ("train", "val", "test")
_SAMPLED_TOKENS = 2**18  # of the fingerprint


class TokenFile(NamedTuple):
    """Path of a token file, NumPy's name of the type, number of tokens, bytes before the first."""

    path: Path
    dtype: str
    n_tokens: int
    offset_bytes: int

    def map(self) -> np.ndarray:
        """Return a read-only memory map of the tokens, (n_tokens,)."""
        return np.memmap(self.path, self.dtype, "r", self.offset_bytes, (self.n_tokens,))


class TokenDataset(BatchDataset):
    """Dataset that cuts token files into windows of T tokens, with the next tokens as targets.

    Sample i is window i, counted over all files. The last target of a window is the first token of
    the next window. Windows never cross the end of a file.

    Args:
        path: File, glob pattern, folder of .bin and .npy files, or a list of these, also with `~`.
        seq_len: Positions of a sample, T.
        dtype: Type of the tokens in raw files: uint16, uint32 or int64. Files with a header or an
            index have their own type.
        vocab_size: Number of tokens of the vocabulary. Raw files of a narrower type than it needs
            are refused; token ids are not compared. None does not check.
        keep_tail: Whether the last tokens of a file that do not fill a window make one more sample,
            padded with targets -100. Every token except the first of each file is then a target
            exactly once.
        split: "train" or "val" leaves out the files of a folder that belong to another split by
            their own name or a folder's name. An empty text takes all files.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If a file or a folder cannot be read.
        DataError: If a folder has no token file, if a file is damaged or has another type, or if
            the files hold no window at all.
    """

    def __init__(
        self,
        path: Paths,
        seq_len: int,
        dtype: str = "uint16",
        vocab_size: int | None = None,
        keep_tail: bool = False,
        split: str = "",
    ) -> None:
        paths = find_token_files(path, split)
        self.files = [open_token_file(file, dtype, vocab_size) for file in paths]
        self.n_tokens = sum(file.n_tokens for file in self.files)
        self.seq_len = seq_len
        extra = seq_len - 1 if keep_tail else 0
        lengths = [max(0, file.n_tokens - 1 + extra) // seq_len for file in self.files]
        self._firsts = np.cumsum([0, *lengths])  # (files + 1,) first window of each file
        self._maps: dict[int, np.ndarray] = {}
        if not len(self):
            message = f"{self.n_tokens} tokens; need at least seq_len+1 = {seq_len + 1}"
            raise DataError(f"{self.files[0].path}: {message}")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the files' token types and lengths, and of a sample of the windows.

        A resumed run compares it, to notice that it would train on other data. Up to 2^18 tokens
        are hashed completely.
        """
        digest = hashlib.sha256(repr([file[1:3] for file in self.files]).encode())
        n_windows = min(len(self), max(256, _SAMPLED_TOKENS // self.seq_len))
        windows = np.linspace(0, len(self) - 1, n_windows).astype(np.int64).tolist()
        for tensor in TokenDataset.__getitems__(self, windows):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a batch: tokens (B, T) and targets (B, T), int64."""
        batch = np.full((len(indices), self.seq_len + 1), IGNORED, dtype=np.int64)  # (B, T+1)
        numbers = (np.searchsorted(self._firsts, indices, side="right") - 1).tolist()
        for row, index, number in zip(batch, indices, numbers, strict=True):
            start = (index - int(self._firsts[number])) * self.seq_len
            if number not in self._maps:
                self._maps[number] = self.files[number].map()
            window = self._maps[number][start : start + self.seq_len + 1]
            row[: len(window)] = window
        tokens = torch.from_numpy(batch[:, :-1])
        targets = torch.from_numpy(batch[:, 1:])
        return tokens.clamp(min=0), targets.contiguous()  # -100 is not a token id

    def describe(self, n_samples: int = 0) -> str:
        """Return a line with the number of tokens, and the epochs of a run of `n_samples`."""
        n_files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        epochs = f" · {n_samples / len(self):.3g} epochs" if n_samples else ""
        return f"{self.n_tokens:,} tokens{n_files}{epochs}"

    def __getstate__(self) -> dict:
        """Return the attributes for pickle, without memory maps, whose content would be copied."""
        return {**self.__dict__, "_maps": {}}


def token_dtype(vocab_size: int) -> str:
    """Return the smallest dtype that holds the tokens of a vocabulary, "uint16" or "uint32"."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def find_token_files(path: Paths, split: str = "") -> list[Path]:
    """Return the files at `path`, of a folder the .bin and .npy files that are of no other split.

    Indices (.idx) of Megatron are left out. Errors are those of `find_files`.
    """
    others = [name for name in _SPLITS if split in _SPLITS and name != split]

    def is_of_split(name: str) -> bool:
        *folders, file = name.split("/")
        is_other = any(other in file or other in folders for other in others)
        return file.endswith((".bin", ".npy")) and not is_other

    return [file for file in find_files(path, is_of_split) if file.suffix != ".idx"]


def open_token_file(
    path: str | os.PathLike, dtype: str = "uint16", vocab_size: int | None = None
) -> TokenFile:
    """Return the layout of a token file. Arguments and errors are those of `TokenDataset`."""
    path = Path(path)
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        head = file.read(_HEADER_BYTES)
    if path.suffix == ".npy" or head.startswith(b"\x93NUMPY"):
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except ValueError as error:
            raise DataError(f"{path}: {first_line(error)}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            message = f"an array {array.shape} of {array.dtype}; needed: integers (N,)"
            raise DataError(f"{path}: {message}")
        return TokenFile(path, array.dtype.str, array.size, array.offset)
    offset_bytes = 0
    expected_tokens = None  # number of tokens by header or index
    magic, version, count = np.frombuffer(head.ljust(_HEADER_BYTES, b"\0"), "<i4")[:3].tolist()
    if path.with_suffix(".idx").is_file():
        dtype, expected_tokens = read_megatron_index(path.with_suffix(".idx"))
    elif magic in _HEADERS:
        known_version, dtype = _HEADERS[magic]
        if version != known_version or size_bytes < _HEADER_BYTES:
            raise DataError(f"{path}: truncated header, or not of version {known_version}")
        expected_tokens = count
        offset_bytes = _HEADER_BYTES
    elif wider := _find_wider(head, dtype, vocab_size):
        message = f"not tokens of {dtype}, or not of this vocabulary"
        raise DataError(f"{path}: {message}; try: data.dtype={wider}")
    n_tokens, rest_bytes = divmod(size_bytes - offset_bytes, np.dtype(dtype).itemsize)
    if rest_bytes or not n_tokens or expected_tokens not in (None, n_tokens):
        counted = "" if expected_tokens is None else f", and its header counts {expected_tokens}"
        message = f"{size_bytes - offset_bytes} bytes of {dtype}{counted}"
        raise DataError(f"{path}: {message}; empty, truncated, or of another dtype")
    return TokenFile(path, dtype, n_tokens, offset_bytes)


def read_megatron_index(path: Path) -> tuple[str, int]:
    """Return dtype and number of all tokens of a Megatron index, or raise a DataError."""
    with open_regular(path) as file:
        head = file.read(_MEGATRON.size).ljust(_MEGATRON.size, b"\0")
        size_bytes = os.fstat(file.fileno()).st_size
    magic, version, code, n_sequences, n_documents = _MEGATRON.unpack(head)
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in _MEGATRON_TYPES:
        raise DataError(f"{path}: not a Megatron index of version 1 with uint16, int32 or int64")
    if not n_sequences or size_bytes < _MEGATRON.size + 12 * n_sequences + 8 * n_documents:
        raise DataError(f"{path}: truncated, or without a sequence")
    # The positions of the sequences in bytes follow their lengths in tokens.
    lengths_end = _MEGATRON.size + 4 * n_sequences
    last_length = np.fromfile(path, "<i4", 1, offset=lengths_end - 4)
    last_position = np.fromfile(path, "<i8", 1, offset=lengths_end + 8 * (n_sequences - 1))
    dtype = _MEGATRON_TYPES[code]
    return dtype, int((last_position // np.dtype(dtype).itemsize + last_length)[0])


def _find_wider(head: bytes, dtype: str, vocab_size: int | None) -> str | None:
    """Return the type of tokens that are read as a narrower type, or None.

    Of a wider type, the upper half of each token is 0, if the ids are small.
    """
    tokens = np.frombuffer(head[: len(head) // 8 * 8], dtype)
    for wider in ("int64", "uint32"):
        n_parts = np.dtype(wider).itemsize // tokens.itemsize
        upper = np.delete(tokens, np.s_[::n_parts]) if n_parts > 1 else tokens
        if len(tokens) >= 16 and n_parts > 1 and tokens.any() and not upper.any():
            return wider
    is_too_narrow = dtype == "uint16" and vocab_size is not None and vocab_size > 2**16
    return "uint32" if is_too_narrow else None

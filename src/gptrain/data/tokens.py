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
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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


@dataclass(eq=False)
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

    path: Paths
    seq_len: int
    dtype: str = "uint16"
    vocab_size: int | None = None
    keep_tail: bool = False
    split: str = ""

    def __post_init__(self) -> None:
        paths = find_token_files(self.path, self.split)
        self.files = [open_token_file(path, self.dtype, self.vocab_size) for path in paths]
        self.n_tokens = sum(len(file) for file in self.files)
        extra = self.seq_len - 1 if self.keep_tail else 0
        lengths = [max(0, len(file) - 1 + extra) // self.seq_len for file in self.files]
        self._firsts = np.cumsum([0, *lengths])  # (files + 1,) first window of each file
        if not len(self):
            raise DataError(f"{self.path}: {self.n_tokens} tokens < seq_len+1 = {self.seq_len + 1}")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the files' token types and lengths, and of a sample of the windows.

        A resumed run compares it, to notice that it would train on other data. Up to 2^18 tokens
        are hashed completely.
        """
        forms = [(file.dtype.name, len(file)) for file in self.files]
        digest = hashlib.sha256(repr(forms).encode())
        n_windows = min(len(self), max(256, _SAMPLED_TOKENS // self.seq_len))
        windows = np.linspace(0, len(self) - 1, n_windows).astype(np.int64).tolist()
        for tensor in TokenDataset.__getitems__(self, windows):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a batch: tokens (B, T) and targets (B, T), int64."""
        windows = np.full((len(indices), self.seq_len + 1), IGNORED, dtype=np.int64)  # (B, T+1)
        numbers = (np.searchsorted(self._firsts, indices, side="right") - 1).tolist()
        for row, index, number in zip(windows, indices, numbers, strict=True):
            start = (index - int(self._firsts[number])) * self.seq_len
            window = self.files[number][start : start + self.seq_len + 1]
            row[: len(window)] = window
        batch = torch.from_numpy(windows)
        return batch[:, :-1].clamp(min=0), batch[:, 1:].contiguous()  # -100 is not a token id

    def describe(self, n_samples: int = 0) -> str:
        """Return a line with the number of tokens, and the epochs of a run of `n_samples`."""
        n_files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        epochs = f" · {n_samples / len(self):.3g} epochs" if n_samples else ""
        return f"{self.n_tokens:,} tokens{n_files}{epochs}"


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

    return [file for file in find_files(path, is_of_split, ()) if file.suffix != ".idx"]


def open_token_file(path: Path, dtype: str = "uint16", vocab_size: int | None = None) -> np.memmap:
    """Map a token file. Arguments and errors are those of `TokenDataset`."""
    with open_regular(path) as file:
        head = file.read(_HEADER_BYTES)
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    offset_bytes = 0
    n_tokens = None  # number of tokens by an index or a header
    try:
        if path.suffix == ".npy" or head.startswith(b"\x93NUMPY"):
            array = np.lib.format.open_memmap(path, mode="r")
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError(f"an array {array.shape} of {array.dtype}; needed: integers (N,)")
            dtype, offset_bytes, n_tokens = array.dtype.str, array.offset, len(array)
        elif path.with_suffix(".idx").is_file():
            dtype, n_tokens = _read_megatron_index(path.with_suffix(".idx"))
        elif magic in _HEADERS:
            known_version, dtype = _HEADERS[magic]
            if version != known_version or len(head) < _HEADER_BYTES:
                raise ValueError(f"truncated header, or not of version {known_version}")
            offset_bytes, n_tokens = _HEADER_BYTES, count
        elif len(head) > 99 and head.isascii() and b"\0" not in head:
            raise ValueError("a text; try: data=text")
        tokens = np.memmap(str(path), dtype, "r", offset_bytes)
        if n_tokens is None and (wider := _find_wider(tokens, vocab_size)):
            raise ValueError(f"not tokens of {dtype} or this vocabulary; try: data.dtype={wider}")
        if n_tokens not in (None, len(tokens)):
            raise ValueError(f"{len(tokens)} tokens of {dtype}, and its header counts {n_tokens}")
    except ValueError as error:
        raise DataError(f"{path}: {first_line(error)}") from error
    return tokens


def _read_megatron_index(path: Path) -> tuple[str, int]:
    """Return dtype and number of all tokens of a Megatron index, or raise a ValueError."""
    with path.open("rb") as file:
        head = file.read(_MEGATRON.size).ljust(_MEGATRON.size, b"\0")
    magic, version, code, n_sequences, _ = _MEGATRON.unpack(head)
    # The lengths of the sequences in tokens follow, and then their positions in bytes.
    lengths_end = _MEGATRON.size + 4 * n_sequences
    is_complete = n_sequences and path.stat().st_size >= lengths_end + 8 * n_sequences
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in _MEGATRON_TYPES or not is_complete:
        raise ValueError("its index is truncated, or not of version 1 with uint16, int32 or int64")
    last_length = np.fromfile(path, "<i4", 1, offset=lengths_end - 4)
    last_position = np.fromfile(path, "<i8", 1, offset=lengths_end + 8 * (n_sequences - 1))
    dtype = _MEGATRON_TYPES[code]
    return dtype, int((last_position // np.dtype(dtype).itemsize + last_length)[0])


def _find_wider(tokens: np.ndarray, vocab_size: int | None) -> str | None:
    """Return the type of the tokens of a file if they are read as a narrower type, or None.

    Of a wider type, the upper half of each token is 0, if the ids are small.
    """
    groups = tokens[: len(tokens) // 4 * 4].reshape(-1, 4)  # full tokens of a wider type
    groups = np.concatenate([groups[:128], groups[len(groups) // 2 :][:128]])  # a sample
    is_narrow = tokens.dtype != "int64" and len(groups) >= 4 and groups.any()
    if is_narrow and not groups[:, 1::2].any():
        return "uint32" if tokens.dtype == "uint16" and groups[:, 2].any() else "int64"
    is_too_narrow = tokens.dtype == "uint16" and vocab_size is not None and vocab_size > 2**16
    return "uint32" if is_too_narrow else None

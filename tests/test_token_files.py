"""Ready token files, raw, with llm.c's header or Megatron's index, are read or refused by name."""

import os
import resource
import struct

import numpy as np
import pytest
import torch

from gptrain.data import DataError, TokenDataset
from gptrain.data.tokens import find_token_files, open_token_file


def write_raw(path, tokens, dtype=np.uint16):
    """Write a file like nanoGPT's prepare.py: only tokens, without a header."""
    np.array(tokens, dtype=dtype).tofile(path)
    return path


def write_headed(path, tokens, dtype=np.uint16, magic=20240520, version=1, count=None):
    """Write a file like llm.c: a header of 256 int32, then the tokens."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, dtype=dtype).tobytes())
    return path


LLAMA = dict(dtype=np.uint32, magic=20240801, version=7)


# ---- what a file is


def test_raw_files_are_as_long_as_their_size_and_headers_say_how_wide_tokens_are(tmp_path):
    file = open_token_file(write_raw(tmp_path / "train.bin", range(1000)), "uint16")
    assert (file.offset, file.dtype, file.tolist()) == (0, "uint16", list(range(1000)))
    wide = TokenDataset(write_raw(tmp_path / "wide.bin", [70000, 1], np.uint32), 1, "uint32")
    assert [part.tolist() for part in wide[0]] == [[70000], [1]]
    for n_tokens in (600, 1):  # no header
        assert len(open_token_file(write_raw(tmp_path / f"{n_tokens}", [0] * n_tokens))) == n_tokens
    gpt2 = open_token_file(write_headed(tmp_path / "gpt2.bin", range(10)), "uint32")
    llama = open_token_file(write_headed(tmp_path / "llama.bin", [128000, 5], **LLAMA))
    assert gpt2.dtype == "uint16" and gpt2.tolist() == list(range(10))
    assert llama.dtype == "uint32" and llama.tolist() == [128000, 5]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write_bytes(b"abc"), "Size of available data is not a multiple"),
        (lambda p: p.write_bytes(b""), "cannot mmap an empty file"),
        (lambda p: write_headed(p, [1, 2], version=2), "header, or not of version 1"),
        (lambda p: write_headed(p, [1, 2], count=3), "2 tokens of uint16, and its header counts 3"),
        (lambda p: write_headed(p, [1, 2], count=1), "2 tokens of uint16, and its header counts 1"),
        (lambda p: os.mkfifo(p), "not a regular file"),
    ],
)
def test_the_error_of_a_token_file_names_the_file(tmp_path, write, message):
    path = tmp_path / "train.bin"
    write(path)
    with pytest.raises(DataError, match=rf"train\.bin: .*{message}"):
        open_token_file(path, "uint16")


# ---- windows


def test_windows_follow_each_other_and_never_cross_a_file(tmp_path):
    write_raw(tmp_path / "0.bin", range(0, 10))
    write_raw(tmp_path / "1.bin", range(100, 103))  # too short for a window
    write_headed(tmp_path / "2.bin", range(200, 209))
    dataset = TokenDataset(str(tmp_path / "*.bin"), 4, "uint16")
    assert len(dataset) == 4
    tokens, targets = dataset.__getitems__([0, 3, 1, 2])
    assert tokens.tolist() == [[0, 1, 2, 3], [204, 205, 206, 207], [4, 5, 6, 7],
                               [200, 201, 202, 203]]  # fmt: skip
    assert torch.equal(targets, tokens + 1)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous() and targets.is_contiguous()
    assert torch.equal(dataset[-1][0], tokens[1])
    with pytest.raises(IndexError):
        dataset[4]


@pytest.mark.parametrize("sizes", [(10, 3, 9), (2,), (5,), (6, 2)])
def test_with_the_tail_every_token_but_the_first_is_a_target_once(tmp_path, sizes):
    for number, size in enumerate(sizes):
        write_raw(tmp_path / f"{number}.bin", range(100 * number, 100 * number + size))
    dataset = TokenDataset(str(tmp_path / "*.bin"), 4, "uint16", keep_tail=True)
    tokens, targets = dataset.__getitems__(range(len(dataset)))
    counted = targets[targets != -100]
    assert counted.tolist() == [100 * n + t for n, size in enumerate(sizes) for t in range(1, size)]
    assert torch.equal(tokens[targets != -100] + 1, counted)
    assert tokens.min() >= 0


# ---- files that are not what they seem


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", ">i8", "uint8"])
def test_an_array_of_numpy_is_read_by_its_own_header(tmp_path, dtype):
    np.save(tmp_path / "train.npy", np.arange(100).astype(dtype))
    dataset = TokenDataset(tmp_path, 9, "uint16")
    tokens, targets = dataset.__getitems__(range(len(dataset)))
    assert tokens.ravel().tolist() == [*range(99)] and targets.ravel().tolist() == [*range(1, 100)]
    os.truncate(tmp_path / "train.npy", 150)
    with pytest.raises(DataError, match=r"train\.npy"):
        TokenDataset(tmp_path, 9, "uint16")


@pytest.mark.parametrize(
    ("written", "read", "hint"),
    [("int64", "uint16", "int64"), ("int64", "uint32", "int64"), ("int32", "uint16", "uint32")],
)
def test_a_raw_file_of_wider_tokens_is_refused_with_its_type(tmp_path, written, read, hint):
    tokens = np.random.default_rng(0).integers(50_000, size=5_000).astype(written)
    tokens.tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=f"data.dtype={hint}$"):
        TokenDataset(tmp_path / "train.bin", 64, read)
    assert TokenDataset(tmp_path / "train.bin", 64, hint)[0][0].tolist() == tokens[:64].tolist()
    tokens[:600] = 0
    tokens.tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=f"data.dtype={hint}$"):
        TokenDataset(tmp_path / "train.bin", 64, read)
    (tmp_path / "train.bin").write_text("words of a text\n" * 99)
    with pytest.raises(DataError, match="a text; try: data=text"):
        TokenDataset(tmp_path / "train.bin", 64, read)


# ---- the same tokens


def test_a_fingerprint_is_of_the_tokens_and_not_of_the_place(tmp_path):
    (tmp_path / "moved").mkdir()
    tokens = np.arange(100_000) % 50_000

    def fingerprint(name, tokens):
        return TokenDataset(write_raw(tmp_path / name, tokens), 64, "uint16").fingerprint

    before = fingerprint("train.bin", tokens)
    assert fingerprint("moved/train.bin", tokens) == before
    assert fingerprint("longer.bin", [*tokens, 1]) != before
    assert fingerprint("other.bin", [*tokens[:-99], *tokens[-99:][::-1]]) != before


# ---- shards and Megatron's files


def write_megatron(path, sequences, dtype=np.uint16, code=8):
    """Write files like Megatron's IndexedDatasetBuilder: tokens in path.bin, index in path.idx."""
    tokens = [np.array(sequence, dtype=dtype) for sequence in sequences]
    lengths = [len(document) for document in tokens]
    path.with_suffix(".bin").write_bytes(b"".join(document.tobytes() for document in tokens))
    places = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
        + np.int32(lengths).tobytes() + places.astype(np.int64).tobytes()
        + np.arange(len(lengths) + 1, dtype=np.int64).tobytes()
    )  # fmt: skip
    return path.with_suffix(".bin")


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4), (np.int64, 5)])
def test_megatrons_files_are_read_by_their_index(tmp_path, dtype, code):
    path = write_megatron(tmp_path / "web_text", [[1, 2, 3], [4], [5, 6]], dtype, code)
    assert open_token_file(path).tolist() == [1, 2, 3, 4, 5, 6]
    assert find_token_files(tmp_path) == find_token_files(str(tmp_path / "web*")) == [path]
    # A file may have tokens between its sequences, here the token 4.
    gap = write_megatron(tmp_path / "gap", [[1, 2, 3], [5, 6]], dtype, code).with_suffix(".idx")
    places = np.array([0, 4]) * np.dtype(dtype).itemsize
    gap.write_bytes(gap.read_bytes()[:42] + places.tobytes() + gap.read_bytes()[58:])
    gap.with_suffix(".bin").write_bytes(np.arange(1, 7).astype(dtype).tobytes())
    assert open_token_file(gap.with_suffix(".bin")).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda index: index[:20], r"web\.bin: its index is truncated, or not of version 1"),
        (lambda index: index[:-30], r"web\.bin: its index is truncated"),
        (lambda index: b"X" + index[1:], r"its index .* not of version 1"),
        (lambda index: index[:17] + b"\6" + index[18:], r"its index .* with uint16"),
        (lambda index: index[:38] + b"\7" + index[39:], r"web\.bin: .* its header counts 10"),
    ],
)
def test_the_error_of_an_index_names_the_file(tmp_path, harm, message):
    index = write_megatron(tmp_path / "web", [[1, 2, 3], [4, 5]]).with_suffix(".idx")
    index.write_bytes(harm(index.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_token_file(tmp_path / "web.bin")


def test_of_a_folder_of_shards_each_split_has_its_own(tmp_path):
    for name in ("val_000000", "train_000002", "train_000001", "test_000000"):
        write_headed(tmp_path / f"fineweb_{name}.bin", range(10))
    names = {
        split: [path.name[8:-4] for path in find_token_files([tmp_path], split)]
        for split in ("train", "val")
    }
    assert find_token_files(tmp_path, "val") == find_token_files([tmp_path], "val")
    assert names == {"train": ["train_000001", "train_000002"], "val": ["val_000000"]}
    assert len(TokenDataset(tmp_path, 3, split="val", keep_tail=True)) == 3


def test_shards_of_a_terabyte_are_not_read_at_the_start(tmp_path):
    for number in range(64):  # holes: no block of the disk is behind them
        with open(tmp_path / f"{number:02}.bin", "wb") as file:
            file.truncate(2**34)
    read_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = TokenDataset(tmp_path, 1024, vocab_size=100)
    assert data.describe().startswith(f"{2**39:,} tokens")
    assert data[len(data) - 1][0].shape == (1024,) and data.fingerprint
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - read_before
    assert grown_kib < 64 * 1024

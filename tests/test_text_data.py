"""Text is split, tokenized and cached such that no byte is lost, counted twice or half written."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptrain.data import DataError, TextDataset

WORDS = ["def", "return", "größe", "値", "x = 1", "🙂", "\tfor i in n:", "", "    pass"]
DATASETS = pytest.mark.engine("datasets")


def make_corpus(folder, n_files=5, seed=0):
    """Files of made-up lines, some in folders, most longer than a piece of the split."""
    random = np.random.default_rng(seed)
    for number in range(n_files):
        path = folder / ("a b" if number % 2 else "ä") / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [" ".join(random.choice(WORDS, 5)) for _ in range(300 * number + 1)]
        path.write_text("\n".join(lines) + ("\n" if number % 3 else ""), encoding="utf-8")
    return folder


DRAW = np.random.default_rng(0)
TEXTS = [f"Story {n}. " + " ".join(DRAW.choice(WORDS[:6], 3 + n * 7 % 90)) for n in range(200)]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path, cache, split="train", tokenizer="bytes", seq_len=64, **options):
    options = {"val_fraction": 0.1, "vocab_size": 400, **options}
    return TextDataset(split, seq_len, path, tokenizer, cache, **options)


def stream(dataset, split):
    return np.fromfile(dataset.path.with_name(f"{split}.bin"), dataset.files[0].dtype)


def documents_of(dataset, *splits):
    """The text of each document, by cutting the token files at their ends."""
    texts = []
    for split in splits or ("train", "val"):
        tokens = stream(dataset, split)
        ends = np.fromfile(dataset.path.with_name(f"{split}.ends"), "<i8")
        n_end = int(dataset.end_id is not None)
        parts = [tokens[a:b] for a, b in pairwise(ends)]
        texts += [dataset.tokenizer.decode(part[: len(part) - n_end]) for part in parts]
    return texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "docs.jsonl"
    return write_lines(path, [{"id": 1, "text": text} for text in TEXTS])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


# ---- which files


def sources(path, tmp_path, pattern="*"):
    """The content of the files that are read, each written once, in their order."""
    dataset = read(path, tmp_path / "cache", seq_len=1, pattern=pattern)
    return Counter("".join(documents_of(dataset)).split())


def write_words(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n" * 20)


def test_files_that_are_hidden_or_do_not_match_are_left_out(tmp_path):
    folder = tmp_path / "corpus"
    write_words(folder, "b.py", "a.py", "c.txt", ".hidden.py", ".git/d.py", "sub/e.py")
    for path, pattern, names in (
        (folder, "*.py", ("b.py", "a.py", "sub/e.py")),
        (folder, "sub/*", ("sub/e.py",)),
        (folder / "c.txt", "*.py", ("c.txt",)),  # a file that is named is read
        ([folder / "sub", f"{folder}/a*", folder / "sub" / "e.py"], "*", ("sub/e.py", "a.py")),
        (folder / "**" / "*.py", "*", ("b.py", "a.py", "sub/e.py")),
    ):
        assert sources(path, tmp_path, pattern) == dict.fromkeys(names, 20)


def test_links_are_followed_and_each_file_is_read_once(tmp_path):
    folder, disk = tmp_path / "corpus", tmp_path / "disk"
    write_words(folder, "a/b.txt", "z/d.txt")
    write_words(disk, "deep/c.txt")
    (folder / "shard").symlink_to(disk)
    (folder / "a" / "again.txt").symlink_to("b.txt")
    (folder / "link").symlink_to("z")
    for name, target in (("up", ".."), ("a/z", "../z"), ("z/a", "../a"), ("self", "self")):
        (folder / name).symlink_to(target)
    (folder / "gone").symlink_to("/unmounted/shard")
    found = sources(folder, tmp_path)
    assert found == dict.fromkeys(("a/b.txt", "z/d.txt", "deep/c.txt"), 20)


# ---- the split


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.text(st.sampled_from("aé値🙂\n \r"), min_size=1, max_size=300), min_size=1, max_size=5
    )
)
def test_no_character_is_lost_whatever_the_text(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("any")
    for number, text in enumerate(["begin " * 9, *texts]):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    dataset = read(folder, folder / "cache", seq_len=1, val_fraction=0.3)
    ended = [text if text.endswith("\n") else f"{text}\n" for text in ["begin " * 9, *texts]]
    assert Counter("".join(documents_of(dataset))) == Counter("".join(ended))


def test_the_split_has_its_share_of_whole_lines_for_every_tokenizer(corpus, cache):
    in_bytes, bpe = read(corpus, cache), read(corpus, cache, tokenizer="bpe", end_of_document=False)
    for split in ("train", "val"):
        assert documents_of(in_bytes, split) == documents_of(bpe, split)
    lines = [line for file in corpus.rglob("*.txt") for line in file.read_text().splitlines()]
    assert Counter("".join(documents_of(bpe)).splitlines()) == Counter(lines)
    share = len(stream(in_bytes, "val")) / len(stream(in_bytes, "train"))
    assert 0.09 < share < 0.14 and len(documents_of(in_bytes, "val")) > 2
    assert bpe.n_tokens < in_bytes.n_tokens / 1.5


def test_records_are_divided_as_a_whole_and_evenly(tmp_path):
    for number in range(20):
        rows = [{"text": text} for text in TEXTS[10 * number : 10 * number + 10]]
        write_lines(tmp_path / f"{number:02}.jsonl", rows)
    dataset = read(tmp_path, tmp_path / "cache")
    assert Counter(documents_of(dataset)) == Counter(f"{text}\n" for text in TEXTS)
    numbers = [int(text.split()[1][:-1]) for text in documents_of(dataset, "val")]
    assert len(numbers) == 20 and max(np.diff(numbers)) < 20


# ---- records


@pytest.mark.parametrize(
    "name",
    [
        "docs.jsonl", "docs.JSONL.GZ", "docs.ndjson", "docs.csv", "docs.TSV",
        *(pytest.param(name, marks=DATASETS) for name in (
            "docs.jsonl.zst", "docs.json", "docs.json.gz", "[x].parquet",
        )),
    ],
)  # fmt: skip
def test_every_kind_of_file_gives_the_same_documents(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    path = tmp_path / name
    texts = [*TEXTS, "NA", "12", 'a "b", c\td\ne']
    lines = "".join(json.dumps({"id": 1, "body": text}) + "\n" for text in texts).encode()
    if "parquet" in name:
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"body": texts}), path)
    elif "csv" in name or "TSV" in name:
        import csv

        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="," if "csv" in name else "\t")
            writer.writerows([("id", "body"), *((1, text) for text in texts)])
    elif name.endswith("zst"):
        import zstandard

        path.write_bytes(zstandard.compress(lines))
    elif ".json" in name and ".jsonl" not in name:
        content = json.dumps([{"id": 1, "body": text} for text in texts]).encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    else:
        # Two compressed files that `cat` has joined are one file.
        halves = [gzip.compress(half) for half in (lines[:99], lines[99:])]
        path.write_bytes(b"".join(halves) if name.endswith("GZ") else lines)
    dataset = read(path, tmp_path / "cache", text_key="body")
    assert Counter(documents_of(dataset)) == Counter(f"{text}\n" for text in texts)
    with pytest.raises(DataError, match=r"no text under 'text'.*body.*try: data\.text_key="):
        read(path, tmp_path / "cache")


# ---- what is written


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_byte_of_validation_is_a_target_once(corpus, cache, tokenizer):
    for seq_len in (7, 64):
        dataset = read(corpus, cache, "val", tokenizer, seq_len, end_of_document=False)
        _, targets = dataset.__getitems__(range(len(dataset)))
        counted = dataset.token_bytes[targets[targets != -100]].sum()
        assert counted == len("".join(documents_of(dataset, "val")).encode())


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_end_token_ends_each_document_where_it_is_wanted(tokenizer, jsonl, cache):
    ended = read(jsonl, cache, tokenizer=tokenizer, end_of_document=True)
    plain = read(jsonl, cache, tokenizer=tokenizer, end_of_document=False)
    default = read(jsonl, cache, tokenizer=tokenizer)
    assert default.path == (plain if tokenizer == "bytes" else ended).path
    assert Counter(documents_of(ended)) == Counter(TEXTS) and plain.end_id is None
    assert (stream(ended, "train") == ended.end_id).sum() == len(documents_of(ended, "train")) + 1
    assert ended.token_bytes[ended.end_id] == 0
    assert ended.end_id not in ended.tokenizer.encode(f"a {ended.tokenizer.end_token} b")
    assert f"{len(documents_of(ended, 'train'))} documents, each ended" in ended.describe()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_masked_samples_number_the_document_of_each_token(tokenizer, jsonl, cache):
    dataset = read(jsonl, cache, tokenizer=tokenizer, documents="masked")
    tokens, targets, numbers = dataset.__getitems__(range(len(dataset)))
    content = stream(dataset, "train")
    assert targets.flatten().tolist() == content[1 : targets.numel() + 1].tolist()
    lengths = np.diff(np.fromfile(dataset.path.with_suffix(".ends"), "<i8"))
    expected = np.repeat(np.arange(len(lengths)), lengths)
    assert numbers.flatten().tolist() == expected[: numbers.numel()].tolist()
    # The context of a document's first token is the first token of the file.
    is_first = numbers.flatten().diff(prepend=torch.tensor([-1])) != 0
    assert (tokens.flatten()[is_first] == int(content[0])).all()
    assert torch.equal(tokens.flatten()[~is_first], targets.flatten()[:-1][~is_first[1:]])


PREPARES = """
import resource, sys
from gptrain.data import TextDataset
folder, *paths = sys.argv[1:]
for path in paths:
    made = TextDataset("train", 64, path, "bytes", folder)
    print(made.fingerprint, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_two_processes_prepare_the_same_once_and_memory_does_not_grow_with_the_text(tmp_path):
    texts = [tmp_path / "short.txt", tmp_path / "long.txt"]
    for path, n in zip(texts, (1, 7), strict=True):
        path.write_bytes(b"some words of a line\n" * (n * 50_000))  # n MB
    command = [sys.executable, "-c", PREPARES, tmp_path / "cache", *texts]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=200)[0].split() for process in both]
    assert printed[0][::2] == printed[1][::2] and len({*printed[0][::2]}) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 2
    for _, short_kib, _, long_kib in printed:
        assert int(long_kib) < int(short_kib) + 5 * 1024  # of 6 MB more text


# ---- the cache


def test_the_same_text_is_prepared_once_and_another_text_again(tmp_path):
    cache = tmp_path / "cache"
    first = read(make_corpus(tmp_path / "one"), cache)
    assert read(tmp_path / "one", cache).path == first.path
    # A copy is tokenized again, but a resumed run sees that it is the same text.
    assert read(make_corpus(tmp_path / "two"), cache).fingerprint == first.fingerprint
    assert read(make_corpus(tmp_path / "three", seed=1), cache).fingerprint != first.fingerprint
    others = ({"val_fraction": 0.2}, {"tokenizer": "bpe"}, {"end_of_document": True})
    assert len({read(tmp_path / "one", cache, **other).path for other in others}) == 3
    assert (
        len({read(tmp_path / "one", cache, split).fingerprint for split in ("train", "val")}) == 1
    )


def test_a_changed_text_of_equal_size_and_time_is_seen(tmp_path):
    """As `tar` with fixed times and `rsync -a` write it: no time of a program shows the change."""
    source, cache = make_corpus(tmp_path / "corpus"), tmp_path / "cache"
    file = source / "ä" / "2.txt"
    first = read(source, cache)
    before = file.stat()
    for write in (
        lambda: file.write_bytes(b"?" * before.st_size),
        lambda: (file.rename(tmp_path / "old"), file.write_bytes(b"!" * before.st_size)),
    ):
        write()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        second = read(source, cache)
        assert second.path != first.path and second.fingerprint != first.fingerprint
        first = second


@pytest.mark.parametrize("name", ["val.bin", "val.ends", "tokenizer.json"])
@pytest.mark.parametrize("harm", ["remove", "truncate"])
def test_a_damaged_folder_is_never_read(harm, name, corpus, tmp_path):
    file = read(corpus, tmp_path, "val", "bpe").path.with_name(name)
    file.unlink() if harm == "remove" else os.truncate(file, 10)
    with pytest.raises((DataError, FileNotFoundError)):
        read(corpus, tmp_path, "val", "bpe")

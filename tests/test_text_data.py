"""Text is split, tokenized and cached such that no byte is lost, counted twice or half written."""

import itertools
import multiprocessing
import os
import re
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptrain.config.check import check_config
from gptrain.config.cli import compose_command
from gptrain.config.compose import resolved
from gptrain.config.preflight.paths import check_files
from gptrain.data import (
    ByteTokenizer,
    DataError,
    JsonTokenizer,
    TextDataset,
    default_corpus,
    load_tokenizer,
    train_bpe,
)
from gptrain.data import corpus as corpus_module
from gptrain.data import prepare as prepare_module
from gptrain.data.corpus import Piece, cut_at, find_sources, read_pieces, scan_source, split
from gptrain.data.prepare import fresh_folder

WORDS = ["def", "return", "größe", "値", "x = 1", "🙂", "\tfor i in n:", "", "    pass"]


def make_corpus(folder, n_files=12, seed=0):
    """Files of made-up lines, some in folders, most longer than a section of the split."""
    random = np.random.default_rng(seed)
    for number in range(n_files):
        path = folder / ("a b" if number % 2 else "ä") / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [" ".join(random.choice(WORDS, 5)) for _ in range(100 * number + 1)]
        path.write_text("\n".join(lines) + ("\n" if number % 3 else ""), encoding="utf-8")
    return folder


def prepare(path, tokenizer, cache_dir, **options):
    """The train part of a corpus; its folder holds the other one too."""
    return TextDataset.from_corpus("train", 1, path, tokenizer, cache_dir, **options)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bpe(corpus, cache):
    pytest.importorskip("tokenizers")
    return prepare(corpus, "bpe", cache, vocab_size=300, end_of_document=False)


def text_of(prepared, part):
    """All text of a part but the newline that it begins with."""
    tokens = np.fromfile(prepared.folder / f"{part}.bin", prepared.files[0].dtype)
    return prepared.tokenizer.decode(tokens)[1:]


def folders(cache):
    return sorted(f.name for f in cache.iterdir() if f.name != "index")


# ---- tokenizers


@given(text=st.text())
def test_a_tokenizer_gives_back_every_text(bpe, text):
    assert ByteTokenizer().encode(text).tolist() == list(text.encode())
    for tokenizer in (ByteTokenizer(), bpe.tokenizer):
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.int64 and tokenizer.decode(tokens) == text
        assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
        assert np.array_equal(tokenizer.encode(text.encode()), tokens)


def test_half_a_character_decodes_to_a_mark(bpe):
    assert ByteTokenizer().decode([0xE5, 0x80, 97, 256, 50000, -1]) == "�a"
    tokenizer = bpe.tokenizer
    for end in range(len(tokenizer.encode("値🙂"))):
        assert isinstance(tokenizer.decode(tokenizer.encode("値🙂")[:end]), str)
    assert tokenizer.decode([10**9, -1, tokenizer.encode("a")[0]]) == "a"


def test_special_tokens_in_a_text_are_text(tmp_path):
    library = pytest.importorskip("tokenizers")
    tokenizer = train_bpe(["some words " * 9], 260, tmp_path / "tokenizer.json")
    inner = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_special_tokens(["<|endoftext|>"])
    inner.enable_truncation(3)
    inner.enable_padding(length=40)
    end = ("<|endoftext|>", inner.token_to_id("<|endoftext|>"))
    inner.post_processor = library.processors.TemplateProcessing(
        single=f"{end[0]} $A", special_tokens=[end]
    )
    inner.save(str(tmp_path / "special.json"))
    special = JsonTokenizer(tmp_path / "special.json")
    text = "words<|endoftext|>words"
    assert np.array_equal(special.encode(text), tokenizer.encode(text))
    assert special.vocab_size == tokenizer.vocab_size + 1
    assert special.token_bytes[-1] == 0 and special.token_bytes[:-1].min() == 1
    inner.add_tokens(["größe"])  # the text of a token that was added is not in byte characters
    inner.save(str(tmp_path / "added.json"))
    assert JsonTokenizer(tmp_path / "added.json").token_bytes[-1] == len("größe".encode())


def test_a_vocabulary_with_gaps_is_stored_wide_and_without_its_spaces_knows_no_bytes(tmp_path):
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"a": 70_000, "?": 0}, unk_token="?"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    tokenizer = JsonTokenizer(tmp_path / "words.json")
    assert (tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.end_id) == (70_001, None, None)
    assert tokenizer.encode("a b a").tolist() == [70_000, 0, 70_000]
    (tmp_path / "text").write_text("a a\n" * 500)
    prepared = prepare(tmp_path / "text", str(tmp_path / "words.json"), tmp_path / "cache")
    assert prepared.files[0].dtype == "uint32" and prepared.tokenizer.token_bytes is None
    assert TextDataset(prepared.folder, "val", 4)[0][0].tolist() == [70_000] * 4


def test_a_tokenizer_comes_back_from_its_folder_where_a_link_is_not_followed(
    bpe, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "victim").write_text("content")
    for tokenizer in (ByteTokenizer(), bpe.tokenizer):
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
        (tmp_path / "tokenizer.json").symlink_to("victim")
        for source in (tokenizer.save(tmp_path), str(tmp_path), "~", "~/tokenizer.json"):
            again = load_tokenizer(source)
            assert again.identity == tokenizer.identity
            assert np.array_equal(again.encode("größe"), tokenizer.encode("größe"))
    assert (tmp_path / "victim").read_text() == "content"


def test_an_invalid_tokenizer_is_named(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(DataError, match=r"t\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(FileNotFoundError, match="byte"):
        load_tokenizer("byte")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"  # no warning in forked data workers


# ---- the corpus


@given(st.lists(st.sampled_from(["a", "é", "値", "🙂", "\n", " ", "b\nc"]), min_size=1))
def test_a_block_is_cut_between_characters(characters):
    block = ("".join(characters) + "end of it").encode()
    cut = cut_at(block)
    assert 0 < cut < len(block)
    assert (block[:cut].decode() + block[cut:].decode()).encode() == block
    assert cut_at(b"") == 0


@pytest.mark.parametrize("val_fraction", [1e-9, 0.1])
def test_pieces_add_up_to_the_text(corpus, val_fraction):
    sources = find_sources(corpus)
    expected = [source.path.read_bytes() for source in sources]
    pieces = list(read_pieces(sources, val_fraction, newline=False))
    assert b"".join(piece.text for piece in pieces) == b"".join(expected)
    assert sum(piece.ends_document for piece in pieces) == len(sources)
    assert any(piece.is_val for piece in pieces) == (val_fraction == 0.1)
    text = b"".join(piece.text for piece in read_pieces(sources, val_fraction))
    assert text == b"".join(t if t.endswith(b"\n") else t + b"\n" for t in expected)


@pytest.mark.parametrize("n_characters", [400, 400_000])
def test_a_text_of_one_line_is_split_between_characters_and_gains_no_newline(
    n_characters, tmp_path
):
    (tmp_path / "line").write_text("値" * n_characters)
    prepared = prepare(tmp_path, "bytes", tmp_path / "cache", val_fraction=0.1)
    text = text_of(prepared, "train") + text_of(prepared, "val")
    assert sorted(text) == ["\n", *"値" * n_characters]


def test_hidden_files_and_those_that_do_not_match_are_left_out(tmp_path):
    for name in ("b.py", "a.py", "c.txt", ".hidden.py", ".git/d.py", "sub/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [d.name for d in find_sources(tmp_path, "*.py")] == ["a.py", "b.py", "sub/e.py"]
    assert [d.name for d in find_sources(tmp_path, "sub/*")] == ["sub/e.py"]
    assert [d.name for d in find_sources(tmp_path / "c.txt", "*.py")] == ["c.txt"]
    assert len(find_sources([tmp_path / "sub", str(tmp_path / "a.py")])) == 2
    assert len(find_sources([tmp_path / "sub", tmp_path / "sub" / "e.py"])) == 1  # named twice
    with pytest.raises(DataError, match=r"no file matches '\*\.md'"):
        prepare(tmp_path, "bytes", tmp_path / "cache", pattern="*.md")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_sources(tmp_path / "nowhere")


def test_folders_and_files_behind_links_are_part_of_a_corpus(tmp_path, recwarn):
    """A corpus is assembled by `ln -s`; a pattern, a glob and a list see the same files."""
    corpus, disk = tmp_path / "corpus", tmp_path / "disk"
    for path in (corpus / "b.txt", disk / "shard" / "deep" / "a.txt", disk / "c.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name * 50)
    (corpus / "shard").symlink_to(disk / "shard")
    (corpus / "c.txt").symlink_to("../disk/c.txt")
    whole = ["b.txt", "c.txt", "shard/deep/a.txt"]
    assert [source.name for source in find_sources(corpus)] == whole
    assert [source.name for source in find_sources(corpus, "shard/*.txt")] == whole[2:]
    assert len(find_sources(corpus / "*")) == len(find_sources(corpus / "**" / "*.txt")) == 3
    assert len(find_sources([corpus / "shard", corpus / "b.txt"])) == 2
    (tmp_path / "link").symlink_to(corpus)
    assert [source.name for source in find_sources(tmp_path / "link")] == whole
    for name, n_problems in (("a", 0), ("b", 1)):  # no folder has a file b.txt
        words = ["data=text", f"data.path={disk}/**/{name}.txt"]
        problems = check_files(check_config(resolved(compose_command(words))))
        assert len(list(problems)) == n_problems
    assert not recwarn.list


def test_links_in_a_circle_and_links_to_nothing_are_one_line_each(tmp_path):
    corpus = tmp_path / "corpus"
    for folder, other in (("a", "b"), ("b", "a")):
        (corpus / folder).mkdir(parents=True)
        (corpus / folder / "text.txt").write_text(folder * 50)
        (corpus / folder / "other").symlink_to(corpus / other)
    (corpus / "up").symlink_to("..")
    (corpus / "self").symlink_to("self")
    (corpus / "gone").symlink_to("/unmounted/shard")
    (corpus / "gone.txt").symlink_to("/unmounted/gone.txt")
    with pytest.warns(UserWarning) as warned:
        names = [source.name for source in find_sources(corpus)]
    assert names == ["a/text.txt", "b/text.txt"]
    lines = sorted(str(warning.message).replace(str(corpus), "corpus") for warning in warned)
    assert lines == [
        "1 link leads back to a folder that contains it and is skipped:"
        " for example corpus/up/corpus",
        "2 paths lead by links to data that other paths name, which is read once:"
        " for example corpus/a/other",
        "3 links have no target and are skipped: for example corpus/self -> self",
    ]
    with pytest.warns(UserWarning, match="3 links lead back to a folder that contains them"):
        names = [source.name for source in find_sources(corpus, "a/*.txt")]
    assert names == ["a/other/text.txt", "a/text.txt"]
    (corpus / "a" / "other").unlink()
    with pytest.warns(UserWarning, match=r"have no target.*gone\.txt -> /unmounted"):
        assert len(find_sources(corpus / "**" / "*.txt")) == 2
    with pytest.raises(FileNotFoundError, match="unmounted"):
        find_sources(corpus / "gone.txt")


def test_a_folder_without_permission_is_skipped_with_one_warning(tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    for name in ("a.txt", "b/c.txt", "d.txt"):
        (tmp_path / name).write_text("text" * 50)
    listdir = os.listdir

    def deny(folder):
        if Path(folder) == denied:
            raise PermissionError(folder)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", deny)
    denied = tmp_path / "b"
    with pytest.warns(UserWarning, match="1 folder cannot be read and is skipped: .*/b$"):
        assert [source.name for source in find_sources(tmp_path)] == ["a.txt", "d.txt"]
    denied = tmp_path
    with pytest.raises(PermissionError):
        find_sources(tmp_path)


def test_a_file_that_two_links_name_is_read_once_under_its_own_name(tmp_path):
    """Two copies of a file could be divided between the training and the validation set."""
    corpus = tmp_path / "corpus"
    (corpus / "z").mkdir(parents=True)
    (corpus / "z" / "text.txt").write_text("text" * 50)
    (corpus / "a.txt").symlink_to("z/text.txt")
    (corpus / "b").symlink_to("z")
    with pytest.warns(UserWarning, match="2 paths lead by links to data that other paths name"):
        assert [source.name for source in find_sources(corpus)] == ["z/text.txt"]
    # A pattern with a folder finds a file under each of its names.
    assert [source.name for source in find_sources(corpus, "b/*.txt")] == ["b/text.txt"]


def test_a_link_is_known_by_its_suffix_as_in_the_hub_cache_of_hugging_face(tmp_path):
    """The hub cache stores `data.jsonl.gz` as a link to a file whose name is a hash."""
    (tmp_path / "0f3a").write_bytes(b"")
    (tmp_path / "data.jsonl.gz").symlink_to("0f3a")
    (source,) = find_sources(tmp_path / "data.jsonl.gz")
    assert (source.format, source.path.suffix) == ("jsonl", ".gz")
    # A link without a suffix is known by the suffix of its target.
    (tmp_path / "rows.jsonl").write_bytes(b"")
    (tmp_path / "plain").symlink_to("rows.jsonl")
    (source,) = find_sources(tmp_path / "plain")
    assert (source.format, source.path) == ("jsonl", tmp_path / "rows.jsonl")


def test_the_default_corpus_is_the_standard_library():
    names = {document.name for document in default_corpus()}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert all(name.endswith(".py") for name in names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    json_files = {name for name in names if re.fullmatch(r"json/[^/]+", name)}
    assert {document.name for document in find_sources(None, "json/*.py")} == json_files


def test_a_share_of_validation_is_between_zero_and_one():
    for share in (0, 1):
        with pytest.raises(ValueError, match=f"val_fraction={share}: must be between 0 and 1"):
            split([], share)


def test_validation_is_an_exact_share_of_whole_lines(corpus):
    documents = find_sources(corpus)
    parts = split(documents, 0.1)
    train, val = ([part for part in parts if part.is_val is is_val] for is_val in (False, True))
    total = sum(document.size_bytes for document in documents)
    val_bytes = sum(part.stop - part.start for part in val)
    assert val_bytes + sum(part.stop - part.start for part in train) == total
    assert abs(val_bytes - 0.1 * total) < 200 * len(val)  # lines are shorter than 200 bytes
    for part in val:
        before = part.source.path.read_bytes()[: part.start]
        assert before == b"" or before.endswith(b"\n")


def test_a_large_file_does_not_make_up_validation_alone(tmp_path, monkeypatch):
    (tmp_path / "large").write_text("line\n" * 100_000)
    for number in range(50):
        (tmp_path / f"{number}").write_text("line\n" * 2000)
    share = Counter()
    for part in filter(lambda part: part.is_val, split(find_sources(tmp_path), 0.2)):
        share[part.source.name] += part.stop - part.start
    # The file is half of the corpus; of 12 sections 6 +- 1.7 are expected in it.
    assert len(share) > 5 and 0.1 < share["large"] / share.total() < 0.9
    # A corpus above 1 GiB has longer sections, so that they fit into memory.
    monkeypatch.setattr(corpus_module, "_MAX_SECTIONS", 4)
    val = [part for part in split(find_sources(tmp_path / "large"), 0.25) if part.is_val]
    assert [part.stop - part.start for part in val] == [125_000]


def test_a_file_that_is_added_moves_few_others(corpus, tmp_path):
    def val_places(folder):
        val = [part for part in split(find_sources(folder), 0.2) if part.is_val]
        return {(part.source.name, at) for part in val for at in range(part.start, part.stop)}

    before, grown = val_places(corpus), make_corpus(tmp_path / "grown")
    (grown / "new.txt").write_text("line\n" * 4000)
    assert len(before & val_places(grown)) > 0.8 * len(before)


def test_a_cache_within_the_corpus_is_no_part_of_it(tmp_path):
    make_corpus(tmp_path)
    cache = tmp_path / "outputs" / "data"
    first = prepare(tmp_path, "bytes", cache)
    assert prepare(tmp_path, "bytes", cache).folder == first.folder
    (tmp_path / "outputs" / "data.txt").write_text("next to the cache")
    found = {source.name for source in find_sources(tmp_path, cache_dir=cache)}
    assert len(found) == 13 and "outputs/data.txt" in found


# ---- prepared


def test_no_byte_is_lost_and_the_split_is_the_same_for_every_tokenizer(corpus, cache, bpe):
    in_bytes = prepare(corpus, "bytes", cache)
    assert text_of(in_bytes, "val") == text_of(bpe, "val")
    assert text_of(in_bytes, "train") == text_of(bpe, "train")
    lines = Counter(
        line for doc in find_sources(corpus) for line in doc.path.read_text().splitlines()
    )
    assert Counter((text_of(bpe, "train") + text_of(bpe, "val")).splitlines()) == lines
    assert (in_bytes.vocab_size, bpe.vocab_size) == (256, 300)
    assert bpe.files[0].n_tokens < in_bytes.files[0].n_tokens / 1.5


def test_every_byte_of_validation_is_a_target_once_whatever_the_tokenizer(corpus, cache, bpe):
    for prepared in (prepare(corpus, "bytes", cache), bpe):
        for seq_len in (7, 64):
            dataset = TextDataset(prepared.folder, "val", seq_len)
            _, targets = dataset.__getitems__(range(len(dataset)))
            counted = dataset.token_bytes[targets[targets != -100]].sum()
            assert counted == len(text_of(prepared, "val").encode())


def test_memory_does_not_grow_with_the_text(tmp_path):
    (tmp_path / "text").write_bytes(b"some words of a line\n" * 1_600_000)  # 34 MB, 67 of tokens
    tracemalloc.start()
    prepare(tmp_path / "text", "bytes", tmp_path / "cache")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 50 * 2**20  # three batches of 1 MiB of text, 8 MiB of ids, and copies


# ---- the cache


def test_a_second_time_nothing_is_read(tmp_path):
    source, cache = make_corpus(tmp_path / "corpus"), tmp_path / "cache"
    first = prepare(source, "bytes", cache)
    file = source / "ä" / "2.txt"
    before = file.stat()
    file.write_bytes(b"?" * before.st_size)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # no one could know
    assert prepare(source, "bytes", cache).folder == first.folder
    os.utime(file)
    assert prepare(source, "bytes", cache).folder != first.folder


def test_the_same_text_in_another_folder_reuses_the_cache(tmp_path):
    cache = tmp_path / "cache"
    first = prepare(make_corpus(tmp_path / "one"), "bytes", cache)
    assert prepare(make_corpus(tmp_path / "two"), "bytes", cache).folder == first.folder
    assert prepare(make_corpus(tmp_path / "three", seed=1), "bytes", cache).folder != first.folder
    assert prepare(tmp_path / "one", "bytes", cache, val_fraction=0.1).folder != first.folder
    assert len(folders(cache)) == 3
    (tmp_path / "one" / "ä" / "2.txt").rename(tmp_path / "one" / "ä" / "3.txt")
    assert prepare(tmp_path / "one", "bytes", cache).folder != first.folder  # names decide, too


def test_files_that_are_not_utf8_are_left_out_with_one_warning(tmp_path):
    source, cache = make_corpus(tmp_path / "corpus"), tmp_path / "cache"
    first = prepare(source, "bytes", cache)
    (source / "image.png").write_bytes(b"\x89PNG")
    (source / "cut.txt").write_bytes("値".encode()[:2])
    (source / "wide.txt").write_bytes(("text\n" * 1000).encode("utf-16"))
    for _ in range(2):  # fresh and from the cache
        with pytest.warns(
            UserWarning, match=r"3 of 15 files are not UTF-8 .* cut\.txt, byte 0"
        ) as warned:
            assert prepare(source, "bytes", cache).folder == first.folder
        assert len(warned) == 1
    with pytest.raises(DataError, match=r"image\.png: byte 0 is not UTF-8; none of 1 files"):
        prepare(source / "image.png", "bytes", cache)


def test_a_file_that_is_not_utf8_any_more_is_one_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("größe\n" * 1000)
    prepare(file, "bytes", tmp_path / "cache")
    before = file.stat()
    file.write_bytes(file.read_bytes().replace("ö".encode(), b"\xff\xff"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # the index finds it unchanged
    with pytest.raises(DataError, match=r"a\.txt: changed since it was hashed"):
        prepare(file, "bpe", tmp_path / "cache", vocab_size=300)


def test_a_file_that_changes_while_it_is_read_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    file, read = tmp_path / "a.txt", prepare_module.batches
    file.write_text("a line\n" * 1000)

    def written_meanwhile(pieces):
        yield from read(pieces)
        os.utime(file, ns=(0, 0))

    monkeypatch.setattr(prepare_module, "batches", written_meanwhile)
    with pytest.raises(DataError, match=r"a\.txt: changed while it was read; start again"):
        prepare(file, "bytes", tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


@pytest.mark.parametrize("place", ["first block", "across two blocks", "second block"])
def test_the_first_byte_that_is_not_utf8_is_found(tmp_path, place):
    text = bytearray(b"x" + "ö".encode() * 2**20)  # a block of 1 MiB ends within a character
    changed, reported = {
        "first block": (70_001, 70_001),
        "across two blocks": (2**20, 2**20 - 1),  # the first byte of the character is reported
        "second block": (2**20 + 70_001, 2**20 + 70_001),
    }[place]
    text[changed] = 0xFF
    (tmp_path / "text").write_bytes(text)
    (source,) = find_sources(tmp_path / "text")
    assert scan_source(source) == (None, reported)
    # What is written to a file after it was found is no part of the corpus.
    (tmp_path / "text").write_bytes(text[:changed])
    (source,) = find_sources(tmp_path / "text")
    before = scan_source(source)
    (tmp_path / "text").write_bytes(text)
    assert scan_source(source) == before


def test_too_little_text_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "text").write_text("ab")
    (tmp_path / "empty").write_text("")
    for name in ("text", "empty"):
        with pytest.raises(DataError, match="too few"):
            prepare(tmp_path / name, "bytes", tmp_path / "cache")
    with pytest.raises(DataError, match="2 bytes of text; too few"):  # the bytes of all files
        prepare(tmp_path, "bytes", tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="full"), fresh_folder(tmp_path / "done") as draft:
        (draft / "train.bin").write_bytes(b"half")
        raise OSError("disk full")
    assert folders(tmp_path) == []

    def refuse(path, target):
        raise OSError("over quota")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="quota"), fresh_folder(tmp_path / "done"):
        pass
    assert folders(tmp_path) == []


def test_of_two_processes_that_write_the_same_the_first_ones_folder_stays(tmp_path):
    with fresh_folder(tmp_path / "done"), fresh_folder(tmp_path / "done") as draft:
        (draft / "a").write_text("second to begin, first to end")
    assert (tmp_path / "done" / "a").exists() and folders(tmp_path) == ["done"]


def link(path):
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


@pytest.mark.parametrize("name", ["val.bin", "val.ends", "tokenizer.json"])
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 10), link])
def test_a_damaged_folder_names_its_file_and_what_to_delete(harm, name, corpus, tmp_path):
    folder = prepare(corpus, "bytes", tmp_path).folder
    harm(folder / name)
    with pytest.raises(
        DataError, match=rf"{folder}/(val|tokenizer).*; delete {folder}, it will be"
    ):
        TextDataset.from_corpus("val", 8, corpus, "bytes", tmp_path)


def test_ends_of_documents_that_are_not_in_order_are_damage(corpus, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    file = prepare(corpus, "bytes", tmp_path).folder / "train.ends"
    files = [
        file.parent / f"{split}.{kind}" for split in ("train", "val") for kind in ("bin", "ends")
    ]
    assert sorted(synced) == sorted(path.stat().st_size for path in files)  # before the rename
    ends = np.fromfile(file, "<i8")
    np.concatenate([ends[-2::-1], ends[-1:]]).tofile(file)
    with pytest.raises(DataError, match=r"train\.ends: does not match train\.bin; delete "):
        prepare(corpus, "bytes", tmp_path)


def test_a_damaged_index_is_made_again_and_nothing_is_written_through_a_link(corpus, tmp_path):
    cache, victim = tmp_path / "cache", tmp_path / "victim"
    folder = prepare(corpus, "bytes", cache).folder
    (index,) = (cache / "index").glob("*.json")
    good = index.read_bytes()
    for content in (b"[1]", good[:-1], b'{"sha256": 5}'):
        index.write_bytes(content)
        assert prepare(corpus, "bytes", cache).folder == folder and index.read_bytes() == good
    index.unlink()
    index.symlink_to(victim / "new")
    with pytest.raises(DataError, match="a link; delete it"):
        prepare(corpus, "bytes", cache)
    index.unlink()
    (cache / "index").rmdir()
    victim.mkdir()
    (cache / "index").symlink_to(victim)
    with pytest.raises(DataError, match="index: a link; delete it"):
        prepare(corpus, "bytes", cache)
    assert list(victim.iterdir()) == []


def prepare_and_stop(corpus, cache, begun):
    """Stands still once the first tokens are written."""

    def one_batch(pieces):
        yield from itertools.islice(read(pieces), 1)
        begun.set()
        time.sleep(60)

    read, prepare_module.batches = prepare_module.batches, one_batch
    prepare(corpus, "bytes", cache)


def test_two_processes_prepare_the_same_and_what_a_killed_one_has_half_made_is_removed(
    corpus, tmp_path
):
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    maker = context.Process(target=prepare_and_stop, args=(corpus, tmp_path / "a", begun))
    maker.start()
    assert begun.wait(30)
    first = prepare(corpus, "bytes", tmp_path / "a")  # the same, while its maker lives
    (draft,) = (name for name in os.listdir(tmp_path / "a") if name.startswith("."))
    assert (tmp_path / "a" / draft / "train.bin").exists()
    elsewhere = tmp_path / "a" / ".another-machine.1"  # locks may hold on one machine only
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    maker.kill()
    maker.join(30)
    prepare(corpus, "bytes", tmp_path / "a", val_fraction=0.2)
    assert draft not in os.listdir(tmp_path / "a") and elsewhere.exists()
    whole = prepare(corpus, "bytes", tmp_path / "b")
    for name in ("train.bin", "train.ends", "val.bin", "val.ends"):
        assert (first.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_a_pipe_is_no_corpus_and_no_tokenizer(tmp_path):
    (tmp_path / "text").write_text("line\n" * 100)
    os.mkfifo(tmp_path / "pipe")
    assert [document.name for document in find_sources(tmp_path)] == ["text"]
    with pytest.raises(DataError, match="pipe: no file matches"):
        find_sources(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: not a regular file"):
        load_tokenizer(tmp_path / "pipe")
    descriptors = Path("/proc/self/fd")  # on Linux only
    n_open = len(os.listdir(descriptors)) if descriptors.exists() else 0
    for _ in range(9):
        with pytest.raises(DataError):
            load_tokenizer(tmp_path / "pipe")
    assert not n_open or len(os.listdir(descriptors)) < n_open + 9


def test_pieces_of_text_are_tokenized_in_batches(monkeypatch):
    monkeypatch.setattr(prepare_module, "_BATCH_BYTES", 10)
    pieces = [Piece(b"a" * n_bytes, False, True, True, n_bytes) for n_bytes in (4, 4, 9, 3, 20, 1)]
    batches = list(prepare_module.batches(pieces))
    assert [[len(piece.text) for piece in batch] for batch in batches] == [
        [4, 4],
        [9],
        [3, 20],
        [1],
    ]


UNKNOWN = {"unk_token": "[UNK]"}


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("WordLevel", UNKNOWN, "cannot encode.*UNK.*try: "),
        ("WordPiece", UNKNOWN, "cannot encode.*UNK.*try: "),
        ("BPE", {"merges": []}, "no token for the character 'é', and no unknown token; try: "),
    ],
)
def test_a_word_that_the_tokenizer_has_no_token_for_is_bad_data(kind, options, message, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = getattr(tokenizers.models, kind)(vocab={"a": 0, "b": 1}, **options)
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>"])
    library.save(str(tmp_path / "words.json"))
    text = tmp_path / "text.txt"
    text.write_text("a b a\tb\n" * 40)
    prepare(text, str(tmp_path / "words.json"), tmp_path / "cache")  # white space is no token
    words = load_tokenizer(tmp_path / "words.json")
    for written in ("a b é a b\n", "éa\n", "aéb\n"):
        text.write_text(written * 40)
        with pytest.raises(DataError, match=rf"words\.json: {message}"):
            prepare(text, str(tmp_path / "words.json"), tmp_path / "cache")
        with pytest.raises(DataError, match=message):
            words.encode(f"<s>{written}", special=True)


def test_a_tokenizer_must_fit_the_vocabulary(corpus, cache):
    assert prepare(corpus, "bytes", cache, vocab_size=300).vocab_size == 256
    assert prepare(corpus, "bytes", cache, vocab_size=256).vocab_size == 256
    with pytest.raises(DataError, match="tokenizer has 256 tokens, vocab_size=255"):
        prepare(corpus, "bytes", cache, vocab_size=255)
    with pytest.raises(ValueError, match=r"vocab_size=255: a BPE starts from 256 bytes$"):
        train_bpe([""], 255, "nowhere")
    with pytest.raises(ValueError, match=r"vocab_size=256: .* 256 bytes and an end token$"):
        train_bpe([""], 256, "nowhere", has_end=True)

"""Documents come from files and records; where one ends is a token, and a sample may keep it."""

import gzip
import json
import shutil
import sys
import time
import tracemalloc
from collections import Counter
from itertools import chain, islice, pairwise

import numpy as np
import pytest
import torch

from gptrain.data import DataError, TextDataset, load_tokenizer
from gptrain.data.corpus import find_sources, read_pieces
from gptrain.data.prepare import map_in_order
from gptrain.data.records import format_of, read_records
from gptrain.data.samples import pack_samples

WORDS = ["the", "cat", "sat", "on", "a", "mat", "größe", "値", "was", "🙂", "seen", "by", "all"]


def make_texts(n_documents=200, seed=0):
    random = np.random.default_rng(seed)
    return [
        f"Story {number}. " + " ".join(random.choice(WORDS, 3 + number * 7 % 90))
        for number in range(n_documents)
    ]


TEXTS = make_texts()
PYARROW = pytest.mark.engine("pyarrow")


def write_records(path, texts, key="text"):
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({key: texts}), path, row_group_size=50)
        return path
    lines = "".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts).encode()
    halves = lines[:99], lines[99:]  # two compressed files that `cat` has joined are one file
    if path.suffix.lower() == ".zst":
        lines = b"".join(map(pytest.importorskip("zstandard").compress, halves))
    elif path.suffix.lower() == ".gz":
        lines = b"".join(map(gzip.compress, halves))
    path.write_bytes(lines)
    return path


def read(path, split="train", tokenizer="bytes", seq_len=64, **options):
    options = {"val_fraction": 0.1, "vocab_size": 400, **options}
    return TextDataset.from_corpus(
        split, seq_len, path, tokenizer, path.parent / "cache", **options
    )


def stream(dataset, split):
    return np.fromfile(dataset.folder / f"{split}.bin", dataset.files[0].dtype)


def documents_of(dataset, split):
    """The text of each document, by cutting the token file at its ends."""
    tokens, ends = stream(dataset, split), np.fromfile(dataset.folder / f"{split}.ends", "<i8")
    parts = [tokens[a:b] for a, b in pairwise(ends)]
    is_end = tokens[0] == dataset.tokenizer.end_id
    if is_end:
        assert all(part[-1] == dataset.tokenizer.end_id for part in parts)
    return [dataset.tokenizer.decode(part[: len(part) - is_end]) for part in parts]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("records") / "docs.jsonl", TEXTS)


@pytest.fixture(scope="module")
def bpe(jsonl):
    pytest.importorskip("tokenizers")
    return read(jsonl, tokenizer="bpe")


# ---- where documents come from


@pytest.mark.parametrize(
    "suffix",
    [".jsonl", ".JSONL.GZ", ".jsonl.zst", ".json.gz", ".json.ZST",
     pytest.param(".parquet", marks=PYARROW)],
)  # fmt: skip
def test_every_kind_of_file_gives_the_same_documents(suffix, tmp_path):
    path = write_records(tmp_path / f"docs{suffix}", TEXTS)
    n_read = sum(piece.n_read_bytes for piece in read_pieces(find_sources(path), 0.1))
    n_bytes = path.stat().st_size  # the progress bar counts these bytes
    assert n_read == n_bytes or (suffix == ".parquet" and 0.8 * n_bytes < n_read <= n_bytes)
    dataset = read(path)
    train, val = documents_of(dataset, "train"), documents_of(dataset, "val")
    assert Counter(train + val) == Counter(text + "\n" for text in TEXTS)
    assert len(val) == 20  # a tenth of them, evenly spread
    numbers = sorted(int(text.split()[1][:-1]) for text in val)
    assert max(np.diff(numbers)) < 20


def test_the_share_of_validation_holds_over_many_files_of_few_records(tmp_path):
    (tmp_path / "many").mkdir()
    for number in range(20):
        write_records(tmp_path / "many" / f"{number}.jsonl", TEXTS[2 * number : 2 * number + 2])
    dataset = read(tmp_path / "many")
    assert len(documents_of(dataset, "train") + documents_of(dataset, "val")) == 40
    assert 3 <= len(documents_of(dataset, "val")) <= 5  # a tenth of 40
    dataset = read(write_records(tmp_path / "empty.jsonl", ["", *TEXTS[:20], "", ""]))
    texts = documents_of(dataset, "train") + documents_of(dataset, "val")
    assert sorted(texts) == sorted(f"{text}\n" for text in TEXTS[:20])  # no empty documents


def test_a_record_above_one_mebibyte_is_one_document_of_one_split(tmp_path):
    texts = ["a line of a long text\n" * 60_000, "a short text\n"]
    sources = find_sources(write_records(tmp_path / "docs.jsonl", texts))
    pieces = list(read_pieces(sources, 0.5))
    assert len(pieces) > 3 and sum(piece.ends_document for piece in pieces) == 2
    assert sum(piece.n_read_bytes for piece in pieces) == sources[0].size_bytes
    for is_val, text in ((True, texts[0]), (False, texts[1])):
        assert b"".join(p.text for p in pieces if p.is_val == is_val).decode() == text


def test_another_text_key_of_the_same_file_gives_the_text_of_that_key(tmp_path):
    path = tmp_path / "docs.jsonl"
    records = [{"a": f"question {number}", "b": f"answer {number}"} for number in range(100)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for key in ("a", "b"):
        dataset = read(path, text_key=key, seq_len=8)
        texts = documents_of(dataset, "train") + documents_of(dataset, "val")
        assert sorted(texts) == sorted(record[key] + "\n" for record in records)


def test_the_suffix_is_not_needed_where_the_format_is_said(tmp_path):
    path = write_records(tmp_path / "docs.data", TEXTS)
    assert len(read(path, format="jsonl").ends) == 181
    syntax = read(path, format="text")
    assert '{"id": 1, "text"' in syntax.tokenizer.decode(stream(syntax, "train"))


@pytest.mark.parametrize("key", [None, "data"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["alpaca.json", "bom.JSON", "alpaca.json.gz"])
def test_a_json_array_is_read_as_records(name, indent, key, tmp_path):
    records = [{"instruction": "write", "output": text, "n": [1, {"x": "]"}]} for text in TEXTS]
    value = records if key is None else {"version": {"data": []}, key: records, "license": "x"}
    content = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    content = b"\xef\xbb\xbf" * name.startswith("bom") + content
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    dataset = read(tmp_path / name, text_key="output")
    texts = documents_of(dataset, "train") + documents_of(dataset, "val")
    assert Counter(map(str.strip, texts)) == Counter(TEXTS)
    (source,) = find_sources(tmp_path / name)
    read_bytes = sum(n for _, n in read_records(source.path, source.format, "output"))
    assert read_bytes == source.path.stat().st_size  # the progress bar counts these bytes
    with pytest.raises(DataError, match=r"record 1: no key 'text'.*try: data\.text_key=instruct"):
        read(tmp_path / name)


def test_of_a_json_array_memory_holds_one_record(tmp_path):
    path = tmp_path / "long.json"
    with path.open("w") as file:
        file.write('[{"text": 1}' + f', {{"text": "{"é" * 10_000}", "n": -1.5e3}}' * 2_000 + "]")
    tracemalloc.start()
    lengths = [len(text) for text, _ in islice(read_records(path, "json", "text"), 1, None)]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lengths == [20_000] * 2_000  # 40 MB
    assert peak_bytes < 2e6


def test_a_number_at_the_end_of_a_block_of_a_json_file_is_read_to_its_last_digit(tmp_path):
    begin, end = '{"notes": "', '", "version": 12345, "data": [{"text": "a"}]}'
    notes = "x" * (2**16 - len(begin) - len('", "version": 12'))
    (tmp_path / "a.json").write_text(begin + notes + end)
    assert [text for text, _ in read_records(tmp_path / "a.json", "json", "text")] == [b"a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b"', "broken JSON"),
        ('[{"text": "a"}, {"text": "b"}', ".*array is not closed"),
        ('[{"text": "a"} {"text": "b"}]', ".*array is not closed"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "more text after the array"),
        ('[{"text": "a"}, {"text": tru e}]', "broken JSON"),
        ('[{"text": "a"}, ' + "[" * 10**6, "nested too deeply"),
        ('["a", "b"]', "record 1: not an object but str; try: data.format=text"),
        ('{"data": [{"text": 1}]}', "record 1: 'text' is not a text but int"),
        ('{"data": [{"text": "a"}], "more" 1}', r"broken JSON \(a key has no value\)"),
        ('{"data": [{"text": "a"}], "more": 1', "more text after the array"),
    ],
)
def test_a_json_array_that_is_damaged_or_holds_no_text_is_one_line(content, message, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=rf"a\.json: {message}") as error:
        read(tmp_path / "a.json")
    assert str(error.value).count("a.json") == 1


@pytest.mark.parametrize(
    "content", ["1", '{"more" 1}', '{"more": [1] "data": [1]}', '{"more": [1], data: [1]}', "{}"]
)
def test_a_file_declared_as_json_without_an_array_names_the_other_formats(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    message = 'a.json: neither one JSON array nor an object with an array under "data"; try: '
    with pytest.raises(DataError, match=f"{message}data.format=jsonl, or data.format=text"):
        read(tmp_path / "a.json", format="json")


def test_a_json_file_in_another_encoding_is_one_line(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "é"}]', encoding="latin-1")
    with pytest.raises(DataError, match=r"a\.json: not UTF-8 text \(invalid continuation byte\)"):
        read(tmp_path / "a.json", format="json")


def test_an_array_of_records_in_another_file_needs_its_format_and_other_json_is_text(tmp_path):
    array = json.dumps([{"text": text} for text in TEXTS])
    (tmp_path / "array.txt").write_text(array)
    assert len(read(tmp_path / "array.txt", format="json").ends) == 181
    (tmp_path / "array.jsonl").write_text(array)
    with pytest.raises(
        DataError, match=r"record 1: not an object but list; try: data\.format=json"
    ):
        read(tmp_path / "array.jsonl")
    package = {"name": "x", "description": "A useful tool.", "files": ["dist", "src"] * 90}
    package["packages"] = {f"lib-{n}": {"engines": {"node": ">= 8"}} for n in range(90)}
    (tmp_path / "package.json").write_text(json.dumps(package))
    assert len(read(tmp_path / "package.json", format="text").ends) > 1
    assert len(read(tmp_path / "package.json").ends) > 1
    points = {"points": [{"x": n, "y": [n, None]} for n in range(200)]}
    (tmp_path / "points.json").write_text(json.dumps(points, indent=1))
    assert read(tmp_path / "points.json").ends.tolist()
    poem = {"title": "A poem", "author": "Some One", "body": TEXTS[0] * 40}
    (tmp_path / "poem.json").write_text(json.dumps(poem))
    assert read(tmp_path / "poem.json").ends.tolist()
    with pytest.raises(DataError, match=r"neither one JSON array.*try: data\.format=jsonl"):
        read(tmp_path / "package.json", format="json")
    (tmp_path / "bracket.json").write_text("[")
    assert format_of(tmp_path / "bracket.json") == "text"


def test_files_folders_and_globs_mix_texts_and_records(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    write_records(folder / "a.jsonl", TEXTS[:100])
    write_records(folder / "b.jsonl.gz", TEXTS[100:])
    (folder / "c.txt").write_text("a plain text")
    for path, n_more in ((folder, 1), (folder / "*.jsonl*", 0)):
        dataset = read(path, val_fraction=0.001)
        texts = documents_of(dataset, "train") + documents_of(dataset, "val")
        assert len(texts) == 200 + n_more
        # One record in a thousand is the first of all files, and not the first of each file.
        assert documents_of(dataset, "val") == [f"{TEXTS[0]}\n"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(folder / "nowhere*")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "broken JSON"),
        ('{"id": 1, "content": "a"}',
         "no key 'text'; keys of the record: id, content; try: data.text_key=content$"),
        ('{"text": 5}', "'text' is not a text but int"),
        ('["text"]', "not an object but list"),
    ],
)  # fmt: skip
def test_a_record_without_text_is_named(line, message, tmp_path):
    path, good = tmp_path / "docs.jsonl", json.dumps({"text": "words " * 40})
    path.write_text(f"{good}\n\n{line}\n" + f"{good}\n\n" * 100)
    # The number is that of the line: empty lines count.
    with pytest.raises(DataError, match=rf"docs\.jsonl: record 3: {message}"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no record"),
        ("b.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-20], "damaged"),
        pytest.param("c.parquet", b"PAR1 no PAR1", "damaged", marks=PYARROW),
        pytest.param("d.jsonl.zst", b"no zstd", "damaged", marks=pytest.mark.engine("zstandard")),
    ],
)
def test_files_that_are_empty_or_damaged_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: {message}"):
        read(tmp_path / name)


@PYARROW
def test_a_parquet_file_without_the_column_names_those_that_it_has(tmp_path):
    import pyarrow.parquet

    path, numbers = tmp_path / "d.parquet", range(len(TEXTS))
    pyarrow.parquet.write_table(pyarrow.table({"id": numbers, "content": TEXTS}), path)
    message = "no column 'text'; columns of the file: id, content; try: data.text_key=content$"
    with pytest.raises(DataError, match=message):
        read(path)
    read(path, text_key="content")
    # Rows are counted from the beginning of the file, which is read 1024 rows at a time.
    write_records(path, [*TEXTS * 6, None])
    with pytest.raises(DataError, match="record 1201: 'text' is not a text but NoneType"):
        read(path)


def test_a_file_whose_optional_package_is_missing_names_the_command_to_install_it(
    tmp_path, monkeypatch
):
    modules = {"a.jsonl.zst": ("zstandard", "zstd"), "b.parquet": ("pyarrow.parquet", "parquet")}
    for name, (module, extra) in modules.items():
        (tmp_path / name).write_bytes(b"any")
        monkeypatch.setitem(sys.modules, module, None)
        package = module.partition(".")[0]
        needed = rf"needs the package {package}: pip install 'gptrain\[{extra}\]'"
        with pytest.raises(ModuleNotFoundError, match=needed):
            read(tmp_path / name)


def test_half_a_surrogate_pair_is_no_reason_to_end(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "a\\ud800b", "title": "c"}\n' * 100)
    assert "a?b" in documents_of(read(path), "train")[0]
    # Texts of another key are not taken from the cache of the first.
    assert documents_of(read(path, text_key="title"), "train")[0] == "c\n"


# ---- where they end


def test_a_trained_bpe_ends_documents_with_its_token(bpe, jsonl):
    assert (bpe.tokenizer.end_token, bpe.tokenizer.end_id) == ("<|endoftext|>", 399)
    texts = documents_of(bpe, "train") + documents_of(bpe, "val")
    assert Counter(texts) == Counter(TEXTS)  # nothing is added but the token
    assert (stream(bpe, "train") == 399).sum() == 181 and bpe.token_bytes[399] == 0
    assert "180 documents, each ended by <|endoftext|>, packed" in bpe.describe()
    assert f" tokens · 2.5 epochs · {len(bpe.ends) - 1} doc" in bpe.describe(len(bpe) * 5 // 2)
    again = load_tokenizer(bpe.folder)
    assert again.end_id == 399 and 399 not in again.encode("a <|endoftext|> b")
    without = read(jsonl, tokenizer="bpe", end_of_document=False)
    assert without.tokenizer.end_id is None and "nothing between them" in without.describe()
    assert read(jsonl, tokenizer="bpe", vocab_size=300).tokenizer.vocab_size == 300


def test_a_bpe_is_trained_on_the_training_text_alone(tmp_path):
    pytest.importorskip("tokenizers")
    texts = ["zyzzyva zyzzyva zyzzyva", *TEXTS[:20]]  # the first record is in the validation set
    dataset = read(write_records(tmp_path / "docs.jsonl", texts), tokenizer="bpe")
    assert "zyzzyva" in documents_of(dataset, "val")[0]
    assert len(dataset.tokenizer.encode("zyzzyva")) == len("zyzzyva")  # no pair of it is learned


def test_a_long_text_that_is_split_into_sections_ends_once(tmp_path):
    """A text above 16 KiB has sections in both splits. Only the end of the file is an end."""
    pytest.importorskip("tokenizers")
    (tmp_path / "texts").mkdir()
    for name, n_lines in (("long.txt", 4000), ("short.txt", 9)):
        lines = (f"{name} line {number} of a text\n" for number in range(n_lines))
        (tmp_path / "texts" / name).write_text("".join(lines))
    dataset = read(tmp_path / "texts", tokenizer="bpe")
    ends = {split: (stream(dataset, split) == 399).sum() for split in ("train", "val")}
    assert len(stream(dataset, "val")) > 1000
    assert sum(ends.values()) == 2 + 2  # two documents, and the context token of each split
    # The context of each section's first token is the end token, not the last token before a cut.
    options = {"tokenizer": "bpe", "seq_len": 64}
    masked = read(tmp_path / "texts", documents="masked", **options)
    tokens, _, numbers = masked.__getitems__(range(len(masked)))
    is_first = numbers.flatten().diff(prepend=torch.tensor([-1])) != 0
    assert is_first.sum() > 2 and (tokens.flatten()[is_first] == 399).all()
    separate = read(tmp_path / "texts", documents="separate", **options)
    begins = np.cumsum([0, *(-(-np.diff(separate.ends) // 64))])[:-1]
    assert len(begins) > 2 and (separate.__getitems__(begins.tolist())[0][:, 0] == 399).all()


def test_bytes_end_documents_where_asked(jsonl):
    plain, ended = read(jsonl), read(jsonl, end_of_document=True)
    assert 255 not in stream(plain, "train") and plain.folder != ended.folder
    assert (plain.end_id, ended.end_id) == (None, 255)  # generation stops at it
    assert (stream(ended, "train") == 255).sum() == 181
    assert ended.token_bytes[255] == 0 and ended.vocab_size == 256
    assert documents_of(ended, "val") == [text[:-1] for text in documents_of(plain, "val")]


def test_a_tokenizer_knows_its_end_from_its_configuration_or_by_name(bpe, jsonl, tmp_path):
    library = pytest.importorskip("tokenizers")
    inner = library.Tokenizer.from_file(str(bpe.folder / "tokenizer.json"))
    inner.add_special_tokens(["<stop>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).end_token == "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    # An older file with other names, which transformers once wrote, does not take precedence.
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert load_tokenizer(tmp_path).end_id == 400
    assert load_tokenizer(tmp_path).special_ids() == {"eos_token_id": 400}
    (tmp_path / "kept").mkdir()
    load_tokenizer(tmp_path).save(tmp_path / "kept")
    assert load_tokenizer(tmp_path / "kept").end_token == "<stop>"
    assert "<stop>" in (tmp_path / "kept" / "tokenizer_config.json").read_text()
    # The prepared tokens keep the end token, and those with another end token are no answer.
    (tmp_path / "docs.jsonl").write_bytes(jsonl.read_bytes())
    options = {"tokenizer": str(tmp_path), "vocab_size": 401}
    assert read(tmp_path / "docs.jsonl", **options).end_id == 400
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").symlink_to("kept/tokenizer_config.json")
    assert read(tmp_path / "docs.jsonl", **options).end_id == 399  # links are not followed
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<stop>"}')
    shutil.rmtree(tmp_path / "cache")
    assert read(tmp_path / "docs.jsonl", **options).end_id == 400
    words = library.Tokenizer(library.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "text").write_text("a a\n" * 500)
    with pytest.raises(DataError, match="has no token for the end of a document"):
        read(tmp_path / "text", tokenizer=str(tmp_path / "words.json"), end_of_document=True)


# ---- packed, separate and masked


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_separate_samples_hold_one_document_each_and_every_token_once(split, tokenizer, jsonl, bpe):
    dataset = read(jsonl, split, tokenizer=tokenizer, documents="separate")
    tokens, targets = dataset.__getitems__(range(len(dataset)))
    context = stream(dataset, split)[0]
    expected = documents_of(dataset, split)
    documents, rows = [], iter(zip(tokens, targets, strict=True))
    for text in expected:
        before, kept = context, []
        while True:  # a sample begins where the previous sample ended
            inputs, outputs = next(rows)
            counted = outputs[outputs != -100]
            assert inputs[0] == before and (outputs[: len(counted)] != -100).all()
            assert torch.equal(inputs[1 : len(counted)], counted[:-1])
            before, kept = counted[-1], kept + counted.tolist()
            if dataset.tokenizer.decode(kept[: len(kept) - (tokenizer == "bpe")]) == text:
                break
        documents.append(kept)
    assert next(rows, None) is None
    assert list(chain(*documents)) == stream(dataset, split)[1:].tolist()
    counted = (targets != -100).sum() / targets.numel()
    assert f" · {counted:.0%} of the positions count" in dataset.describe()
    n_tokens = len(stream(dataset, split))  # a sample may be longer than the whole split
    long = read(jsonl, split, tokenizer=tokenizer, documents="separate", seq_len=n_tokens)
    assert len(long) == len(expected)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_masked_samples_are_full_and_number_the_document_of_each_token(tokenizer, jsonl, bpe):
    dataset, seq_len = read(jsonl, tokenizer=tokenizer, documents="masked"), 64
    tokens, targets, numbers = dataset.__getitems__(range(len(dataset)))
    content = stream(dataset, "train")
    assert targets.flatten().tolist() == content[1 : len(dataset) * seq_len + 1].tolist()
    documents = documents_of(dataset, "train")
    end = [dataset.tokenizer.end_id] if tokenizer == "bpe" else []
    encoded = [[*dataset.tokenizer.encode(text), *end] for text in documents]
    expected = np.repeat(np.arange(len(encoded)), [len(document) for document in encoded])
    assert numbers.flatten().tolist() == expected[: numbers.numel()].tolist()
    # The context of a document's first token is the first token of the file.
    is_first = numbers.flatten().diff(prepend=torch.tensor([-1])) != 0
    assert (tokens.flatten()[is_first] == int(content[0])).all()
    inner = ~is_first
    assert torch.equal(tokens.flatten()[inner], targets.flatten()[:-1][inner[1:]])
    assert len(dataset[0]) == 3 and len(dataset) == (len(content) - 1) // seq_len


def test_packing_takes_the_longest_item_first_into_the_fullest_sample_that_has_space():
    """Three samples of 6 positions hold 17. Items in another order would need a fourth sample."""
    assert pack_samples([1, 4, 3, 3, 5, 1], 6) == [[4, 0], [1, 5], [2, 3]]


def test_batches_come_back_in_their_order_whichever_is_done_first():
    def encode(number):
        time.sleep(0.01 * (number % 3))
        return number

    assert list(map_in_order(encode, range(20))) == list(range(20))

"""A tokenizer gives back each text, and one that does not is found before the training."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from gptrain.data import TextDataset, Tokenizer, load_tokenizer, train_bpe


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    return train_bpe(["some words größe 値 def return\n" * 99], 300, path, has_end=True)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_tokenizer_gives_back_every_text(bpe, text):
    for tokenizer in (load_tokenizer("bytes"), bpe):
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.int64 and tokenizer.decode(tokens) == text
        assert tokenizer.token_bytes[tokens].sum() == len(text.encode())


def test_the_control_tokens_of_bytes_are_no_text():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.vocab_size == 256 and tokenizer.token_bytes[254:].tolist() == [0, 0]
    assert tokenizer.encode("<|im_start|>a<|im_end|>", special=True).tolist() == [254, 97, 255]
    assert len(tokenizer.encode("<|im_end|>")) == 10
    assert (tokenizer.end_token, tokenizer.end_id) == ("<|im_end|>", 255)


def test_half_a_character_decodes_to_a_mark(bpe):
    assert load_tokenizer("bytes").decode([0xE5, 0x80, 97, 256, 50000, -1]) == "�a"
    for end in range(len(bpe.encode("値🙂"))):
        assert isinstance(bpe.decode(bpe.encode("値🙂")[:end]), str)


def test_special_tokens_padding_and_truncation_of_a_file_do_not_change_a_text(bpe, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(bpe.path))
    inner.enable_truncation(3)
    inner.enable_padding(length=40)
    end = ("<|endoftext|>", inner.token_to_id("<|endoftext|>"))
    inner.post_processor = processors.TemplateProcessing(
        single=f"{end[0]} $A", special_tokens=[end]
    )
    inner.add_tokens(["größer"])  # the text of a token that was added is not in byte characters
    inner.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path)
    text = "some words<|endoftext|>some words"
    assert again.encode(text).tolist() == bpe.encode(text).tolist()
    assert again.token_bytes[again.core.token_to_id("größer")] == len("größer".encode())


def test_a_vocabulary_with_gaps_is_stored_wide_and_knows_no_bytes(tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({"a": 70_000, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(tmp_path / "words.json")
    assert (tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.end_id) == (70_001, None, None)
    (tmp_path / "text").write_text("a a\n" * 500)
    options = ("val", 4, tmp_path / "text", str(tmp_path / "words.json"), tmp_path / "cache")
    assert TextDataset(*options)[0][0].tolist() == [70_000] * 4


LOSSY = {
    "characters": (models.BPE({c: i for i, c in enumerate("abcdefgh ")}, []), None, "x"),
    "unknown words": (models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"), None, "x"),
    "nothing": (models.BPE({c: i for i, c in enumerate("abcdefghx ")}, []), None, None),
    "capitals": (
        models.BPE({c: i for i, c in enumerate("abcdefghx ")}, []), normalizers.Lowercase(), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOSSY)
def test_characters_that_a_tokenizer_drops_are_one_warning(kind, tmp_path, recwarn):
    model, normalizer, lost = LOSSY[kind]
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "a b x " * 500
    (tmp_path / "text").mkdir()
    for number in range(99):  # the character is not in the texts that are tokenized first
        last = text.upper() if normalizer else text
        (tmp_path / "text" / f"{number:02}.txt").write_text(last if number == 98 else "a b a ")
    TextDataset("train", 4, tmp_path / "text", str(tmp_path / "tokenizer.json"), tmp_path / "cache")
    warned = [str(w.message) for w in recwarn if "data.tokenizer" in str(w.message)]
    assert len(warned) == (lost is not None) and all(f"such as {lost}" in line for line in warned)


def test_the_end_token_is_that_of_the_configuration_or_known_by_its_name(bpe, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(bpe.path))
    inner.add_special_tokens(["<stop>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).end_token == "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    stop = load_tokenizer(tmp_path)
    assert stop.end_id == bpe.end_id + 1 and stop.special_ids() == {"eos_token_id": stop.end_id}
    (tmp_path / "text").write_text("some words\n" * 500)
    options = ("val", 4, tmp_path / "text", str(tmp_path), tmp_path / "cache")
    assert TextDataset(*options).end_id == stop.end_id
    (tmp_path / "tokenizer_config.json").unlink()  # tokens with another end are no answer
    assert TextDataset(*options).end_id == bpe.end_id


def test_a_tokenizer_comes_back_from_its_folder_with_its_companions(bpe, tmp_path, monkeypatch):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    bpe.save(source)
    config = {"eos_token": "<|endoftext|>", "chat_template": [{"name": "default", "template": "x"}]}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(source).chat_template == "x"
    (source / "chat_template.jinja").write_text("größe")
    (tmp_path / "victim").write_text("content")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copy / name).symlink_to("../victim")  # a link is replaced, not followed
    tokenizer = load_tokenizer(source)
    (source / "chat_template.jinja").unlink()  # the template is not copied, but written
    tokenizer.save(copy)
    tokenizer.save(source)  # in its place it stays
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in (copy, "~/copy", "~/copy/tokenizer.json"):
        again = load_tokenizer(place)
        assert isinstance(again, Tokenizer) and again.identity == load_tokenizer(source).identity
        assert (again.chat_template, again.end_id) == ("größe", bpe.end_id)
    assert (tmp_path / "victim").read_text() == "content"

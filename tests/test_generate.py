"""Text out of a trained net: in whole characters, as it is made, from wherever the net lies."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import tokenizers
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import gptrain
from gptrain.config.cli import run_command
from gptrain.data import Tokenizer, load_tokenizer, train_bpe
from gptrain.generate.__main__ import GenerateRun, generate, quote_text
from gptrain.text.chat import CHATML, ChatFormat
from gptrain.text.sampling import Sampling
from gptrain.text.writing import Writer, decode_until
from tests.conftest import CORPUS

BYTES = load_tokenizer("bytes")


@pytest.fixture
def write(capfd):
    """Runs the command in this process; returns its exit code, the text, and what it said."""

    def run(source: Path, *words: str) -> tuple[int, str, str]:
        argv = [quote_text(word) for word in (f"from_run={source}", "n_tokens=12", *words)]
        code = run_command(generate, argv, GenerateRun)
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def bpe(tmp_path) -> Tokenizer:
    return train_bpe([CORPUS], 270, tmp_path / "bpe.json")


# Pieces of text


def pieces(tokens, n_prompt=1, stop=(), tokenizer=BYTES) -> list[str]:
    """Return the text that is shown after each new token, and at the end."""
    shown, made = [], list(tokens[n_prompt:])

    def one_by_one():
        for token in made:
            shown.append("")
            yield token

    for piece in decode_until(tokenizer, list(tokens[:n_prompt]), one_by_one(), stop):
        shown[-1] += piece
    return shown


def test_a_character_is_shown_when_its_last_byte_is_there_or_none_of_it_can_be():
    assert pieces("aé數".encode()) == ["", "é", "", "", "數"]
    assert pieces(b"a\x80\x80b\xe6") == ["", "", "\ufffd\ufffdb", "\ufffd"]


def test_a_tokenizer_that_falls_back_to_bytes_shows_each_character(tmp_path):
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    model = tokenizers.models.BPE(vocab, [], byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    inner.decoder = tokenizers.decoders.ByteFallback()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for n_prompt in (9, 12, 18):  # the last tokens of a prompt may begin within a character
        tokens = "東京は大きいです".encode()
        made = "".join(pieces(tokens, n_prompt, (), tokenizer))
        assert made == tokens[n_prompt:].decode()


@given(st.lists(st.integers(0, 269), min_size=2, max_size=200), st.integers(1, 100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_all_pieces_together_are_the_text_of_all_tokens(bpe, tokens, n_prompt):
    n_prompt = min(n_prompt, len(tokens) - 1)
    for tokenizer in (BYTES, bpe):
        prompt = tokenizer.decode(tokens[:n_prompt])
        if not prompt.endswith("\ufffd"):  # a prompt ends with a full character
            made = pieces(tokens, n_prompt, (), tokenizer)
            assert prompt + "".join(made) == tokenizer.decode(tokens)


@given(
    st.text("ab\n", min_size=2, max_size=60),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop_text_that_is_made(text, stop):
    made = text[1:]
    ends = [made.index(text) + len(text) for text in stop if text in made]
    shown = pieces(text.encode(), stop=stop)
    if not ends:
        assert "".join(shown) == made
    else:  # among the stop texts that are complete first, the earliest start counts
        done = made[: min(ends)]
        assert "".join(shown) == done[: min(done.index(s) for s in stop if s in done)]


# What is typed


@given(st.sampled_from(["prompt", "stop"]), st.text() | st.text(r"\'${}[]a=, ?#").map(str))
@settings(max_examples=30)
def test_a_prompt_reaches_the_net_as_it_was_typed(key, text):
    word = quote_text(f"{key}={text}")
    if text == "???" or word == f"{key}={text}":  # OmegaConf's word for no value; Hydra's grammar
        assert text == "???" or text[0] in "['\""
        return
    value = OverridesParser.create().parse_override(word).value()
    assert OmegaConf.create({key: value})[key] == text


# From a run, moved; its checkpoints; its exports


def test_a_moved_run_generates_text_without_its_data(write, speaker):
    net, tokenizer = gptrain.load(speaker, with_tokenizer=True)
    tokens = list(tokenizer.encode("é x"))
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(net(torch.tensor([tokens]))[0, -1].argmax()))
    checkpoint = next((speaker / "checkpoints").glob("step-*"))
    for source, words in (
        (speaker, ["temperature=0", "trust=false", "debug=true", "trainer.accelerator=cpu"]),
        (checkpoint, ["top_k=1"]), (checkpoint / "state.ckpt", ["top_p=1e-6", "temperature=3"]),
    ):  # fmt: skip
        made = write(source, "prompt=é x", *words)
        assert made == (0, tokenizer.decode(tokens) + "\n", "")


# As a person sees it


class Answers(torch.nn.Module):
    """Says "xy" and the end of a message to the second question, and "abcd" to any other.

    `given` has the tokens that were read before each answer.
    """

    def __init__(self):
        super().__init__()
        self.given = []
        self.weight = torch.nn.Parameter(torch.ones(1))  # says on which device the net is

    def forward(self, tokens):
        prompt = tokens[0].tolist()
        first = b"x" if prompt.count(BYTES.core.token_to_id("<|im_start|>")) == 4 else b"a"
        said = dict(zip(b"\nabcxy", first + b"bcdy\xff", strict=True))
        if prompt[-1] == ord("\n"):
            self.given.append(prompt)
        return torch.nn.functional.one_hot(tokens * 0 + said[prompt[-1]], 256) * 99.0


def test_a_chat_continues_its_conversation_and_ends_an_answer_at_each_end_token(monkeypatch):
    """The byte d ends a text of the run, and the byte 255 ends a message of the template."""
    tokenizer, net, screen = load_tokenizer("bytes"), Answers(), io.StringIO()
    tokenizer.chat_template, tokenizer.stop_ids = CHATML, [ord("d")]
    writer = Writer(net, tokenizer, Sampling(0), 5, [], 0, is_chat=True)
    monkeypatch.setattr("sys.stdout", screen)
    questions, talk = ["one?", "two??", "three???"], []
    for question in questions:
        writer.write(question)
    assert screen.getvalue() == "abc\nxy\nabc\n"
    for question, answer, prompt in zip(questions, ("abc", "xy", "abc"), net.given, strict=True):
        talk.append({"role": "user", "content": question})
        assert prompt == ChatFormat(tokenizer).encode_prompt(talk)
        talk.append({"role": "assistant", "content": answer})
    Writer(net, tokenizer, Sampling(0), 5, [], 0).write("\x1bb")  # a prompt is continued itself
    assert screen.getvalue() == "abc\nxy\nabc\n" + "\x1bbc\n"  # no terminal

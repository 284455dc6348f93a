"""Scores of texts, against one look at the net for each token; text from Python."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import gptrain
from gptrain.data import load_tokenizer, train_bpe
from gptrain.models import SimpleGPT
from recipes.scores import score_continuations

BYTES, LIMIT = load_tokenizer("bytes"), 8
TEXT = "für naïve 數據, and more"


@pytest.fixture
def net() -> SimpleGPT:
    return SimpleGPT(256, d_model=16, n_heads=2, n_layers=1, max_seq_len=LIMIT, dropout=0.5)


def look(net, tokens: torch.Tensor, n: int) -> float:
    """Log-probability of the n-th token after as many as the net can see."""
    with torch.no_grad():
        logits = net.eval()(tokens[None, max(0, n - LIMIT) : n])[0, -1]
    return logits.log_softmax(-1)[tokens[n]].item()


def test_every_token_is_scored_after_all_that_the_net_can_see(net):
    tokens = torch.as_tensor(BYTES.encode(TEXT))
    truth = [look(net, tokens, n) for n in range(1, len(tokens))]
    net.train()
    (score,) = gptrain.score(net, BYTES, [TEXT], context=LIMIT)
    assert net.training
    assert score.log_probs.tolist() == pytest.approx(truth, abs=1e-5)
    nats, n = -sum(truth), len(truth)
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nats / n), rel=1e-5)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / n, rel=1e-5)


def test_a_score_has_the_values_worked_out_by_hand():
    """P(b) = 1/2 and P(c) = 1/4, so that "abcb" has 1 + 2 + 1 bits after its first byte."""
    probabilities = torch.full((256,), 1 / 4 / 254)
    probabilities[list(b"bc")] = torch.tensor([1 / 2, 1 / 4])
    net = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(probabilities.log().tile(256, 1)))
    (score,) = gptrain.score(net, BYTES, ["abcb"])
    assert score.nats == pytest.approx(4 * math.log(2))
    assert score.bits_per_byte == pytest.approx(4 / 3)
    assert score.perplexity == pytest.approx(2 ** (4 / 3))
    pairs = [([*b"a"], [*b"bcb"]), ([*b"abc"], [*b"b"])]  # the net has no limit of length
    nats = [-4 * math.log(2), -math.log(2)]
    assert score_continuations(net, pairs) == pytest.approx(nats)


def test_bits_per_byte_count_the_bytes_of_the_scored_tokens_alone(tmp_path):
    """The first token is not scored, so its bytes do not count, however many it has."""
    tokenizer = train_bpe(["naïve naïve 數據 數據 and more " * 9], 280, tmp_path / "bpe.json")
    text = "naïve 數據, and more"
    tokens = torch.as_tensor(tokenizer.encode(text))
    first_bytes = len(tokenizer.decode(tokens[:1].tolist()).encode())
    assert first_bytes > 1 and len(tokens) > 4
    net = SimpleGPT(280, d_model=16, n_heads=2, n_layers=1, max_seq_len=LIMIT)
    nats = -sum(look(net, tokens, n) for n in range(1, len(tokens)))
    (score,) = gptrain.score(net, tokenizer, [text], context=LIMIT)
    bits = nats / math.log(2)
    assert score.bits_per_byte * (len(text.encode()) - first_bytes) == pytest.approx(bits, rel=1e-5)
    # A tokenizer that is not byte-level has no table of sizes.
    words = Tokenizer(models.WordLevel({"größe": 0, "値": 1}, unk_token="値"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    (score,) = gptrain.score(net, load_tokenizer(tmp_path / "words.json"), ["größe 値"])
    assert score.n_bytes == len(" 値".encode())


@pytest.mark.parametrize("context", [1, 3, None])
def test_a_token_is_scored_once_in_windows_that_give_it_its_context(net, context):
    tokens, seen = torch.as_tensor(BYTES.encode(TEXT)), []
    net.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    (score,) = gptrain.score(net, BYTES, [TEXT], context=context)
    assert len(score.log_probs) == len(tokens) - 1 and max(seen) == LIMIT
    step = LIMIT + 1 - (context or LIMIT // 2)
    assert len(seen) == 1 + math.ceil((len(tokens) - 1 - LIMIT) / step)
    assert score.log_probs[:LIMIT].tolist() == pytest.approx(
        [look(net, tokens, n) for n in range(1, LIMIT + 1)], abs=1e-5
    )


def test_text_follows_each_prompt_up_to_a_stop_and_is_drawn_by_the_seed(net, monkeypatch):
    # Another test of this process may have imported the package of the command
    # `python -m gptrain.generate`, which then hides the function of the same name.
    monkeypatch.delitem(vars(gptrain), "generate", raising=False)
    first = gptrain.generate(net, BYTES, ["a", "b"], 20, seed=1)
    assert first == gptrain.generate(net, BYTES, ["a", "b"], 20, seed=1)
    assert first != gptrain.generate(net, BYTES, ["a", "b"], 20, seed=2)
    (text,) = gptrain.generate(net, BYTES, ["ab"], 8, temperature=0)
    (cut,) = gptrain.generate(net, BYTES, ["ab"], 8, temperature=0, stop=[text[2]])
    assert cut == text[: text.index(text[2])]
    for limit in ({"top_k": 1}, {"top_p": 1e-9}):  # only the most probable token passes
        assert gptrain.generate(net, BYTES, ["ab"], 8, temperature=9, **limit) == [text]
    tokenizer = load_tokenizer("bytes")
    tokenizer.stop_ids = [int(net.eval()(torch.tensor([[97, 98]]))[0, -1].argmax())]
    assert gptrain.generate(net, tokenizer, ["ab"], 8, temperature=0) == [""]
    once, again = gptrain.generate(net, BYTES, ["a", "a"], 20, seed=1)
    assert once != again  # all prompts share one random generator

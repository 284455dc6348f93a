"""The next token is sampled at the last position, by temperature, top-k, top-p and seed."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from gptrain.models import SimpleGPT
from gptrain.text.sampling import Sampling, generate, terminal_text

V = 12
SIZES = {"vocab_size": 61, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 24}


class Counts(nn.Module):
    """Says the successor of the last token, as sure as `sharpness`; of the others, nonsense."""

    max_seq_len = 4

    def __init__(self, sharpness=50.0):
        super().__init__()
        self.sharpness, self.seen, self.modes = sharpness, [], []

    def forward(self, tokens):
        self.seen.append(tokens[0].tolist())
        self.modes.append(self.training)
        logits = torch.zeros(len(tokens), tokens.shape[1], V)
        logits[:, :, 0] = self.sharpness
        logits[:, -1] = self.sharpness * nn.functional.one_hot((tokens[:, -1] + 1) % V, V)
        return logits


class Recurrent(nn.Module):
    """A user's net: no cache, no limit of length, no vocab_size."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(V, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, V)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


def write(net, n_tokens, prompt=(5,), seed=0, cache=False, **options):
    """The prompt and what follows it."""
    generator = torch.Generator().manual_seed(seed)
    made = generate(net, list(prompt), n_tokens, Sampling(**options), generator, cache)
    return [*prompt, *made]


def learned(**changes) -> SimpleGPT:
    """A net with weights of a size that makes some tokens far likelier than others."""
    net = SimpleGPT(**{**SIZES, "dropout": 0.1, **changes}).requires_grad_(False)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return net


def test_a_net_sees_as_much_as_it_can_and_is_in_evaluation_mode():
    net = Counts().train()
    write(net, 6, prompt=(1, 2))
    assert net.seen == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7]]
    assert not any(net.modes) and net.training
    drawn = generate(net, [1], 6, Sampling(), torch.Generator())
    next(drawn)
    drawn.close()  # a stop text ends it early
    assert net.training
    assert not [*generate(net, [1], 6, Sampling(), torch.Generator(), stop_ids={2})]
    assert net.training
    write(net.eval(), 2)
    assert not net.training  # the mode that the caller had chosen


def test_a_seed_decides_what_is_drawn_and_the_runs_own_numbers_stay():
    before = torch.get_rng_state()
    texts = [write(Counts(1.0), 20, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 9, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("length", [1, 24, 40])
def test_with_a_cache_the_same_tokens_come_also_beyond_max_seq_len(length, options):
    net, prompt = learned(), torch.randint(61, (length,)).tolist()
    plain = write(net, 30, prompt, **options)
    assert write(net, 30, prompt, cache=True, **options) == plain
    assert len(set(plain)) > 5


def test_with_a_cache_each_position_goes_through_the_net_once():
    net, widths = learned(), []
    net.blocks[0].register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    write(net, 16, prompt=[1] * 10, cache=True)  # the net has 24 positions
    assert widths == [10, *[1] * 14, 24]


def test_a_net_without_cache_and_limit_is_given_the_whole_text():
    net, tokens = Recurrent(), [3, 1]
    with torch.no_grad():
        for _ in range(8):
            tokens.append(int(net(torch.tensor([tokens]))[0, -1].argmax()))
    assert write(net, 8, prompt=(3, 1), temperature=0, cache=True) == tokens


# What is left of known probabilities, by each definition.
SHARES = torch.tensor([0.05, 0.4, 0.2, 0.25, 0.1])


@pytest.mark.parametrize(
    "options, kept",
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"temperature": 0}, {1}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 99, "top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),  # the fewest that reach it
        ({"top_p": 0.84}, {1, 2, 3}),
        ({"top_k": 2, "top_p": 0.84}, {1, 3}),  # top_k keeps fewer than top_p
        ({"top_k": 3, "top_p": 0.41}, {1, 3}),  # top_p keeps fewer than top_k
        ({"temperature": 0.5, "top_p": 0.9}, {1, 2, 3}),  # squares: .0025 .16 .04 .0625 .01
    ],
    ids=str,
)
def test_a_limit_leaves_these_and_their_ratios(options, kept):
    weights = Sampling(**options).weights(SHARES.log()[None].repeat(2, 1))
    assert torch.equal(weights[0], weights[1])
    assert set(weights[0].nonzero().flatten().tolist()) == kept
    expected = SHARES ** (1 / (options.get("temperature") or 1))
    ratios = (weights[0] / expected)[sorted(kept)]
    torch.testing.assert_close(ratios, ratios[:1].expand(len(kept)), rtol=1e-5, atol=0)


def test_top_p_keeps_no_token_beyond_those_that_reach_it_exactly():
    shares = torch.tensor([[0.25, 0.5, 0.25]])
    assert Sampling(top_p=0.5).weights(shares.log()).tolist() == [[0, 0.5, 0]]
    ties = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    assert Sampling(top_p=0.5).weights(ties.log()).tolist() == [[0.25, 0.25, 0, 0]]


@pytest.mark.parametrize(
    "options, share",
    [
        ({"temperature": 0}, 1),
        ({"temperature": 0.1}, 1),
        ({"temperature": 1.0}, math.e**2 / (math.e**2 + 11)),
        ({"temperature": 100.0}, math.e**0.02 / (math.e**0.02 + 11)),
        ({"top_k": 2}, math.e**2 / (math.e**2 + 1)),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_are_likely(options, share):
    """The successor of the last token has a logit of 2, eleven others of 0."""
    text = write(Counts(sharpness=2.0), 1000, **options)
    followed = sum(b == (a + 1) % V for a, b in pairwise(text)) / 1000
    assert followed == pytest.approx(share, abs=4 * (share * (1 - share) / 1000) ** 0.5)


def test_a_temperature_near_zero_is_greedy_and_no_overflow():
    logits = torch.tensor([[1e4, 1e4 + 10, -1e4]])
    assert Sampling(1e-30).weights(logits).tolist() == [[0, 1, 0]]


def test_tokens_that_are_not_text_are_shown_as_a_dot():
    assert terminal_text("a\x1b[31m\nb\t\N{REPLACEMENT CHARACTER}\x00") == "a·[31m\nb\t··"

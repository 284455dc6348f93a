"""Keys and values are kept: a net that is given new tokens alone says what it says of them all."""

from __future__ import annotations

import pytest
import torch

from gptrain.models import Llama, SimpleGPT

SIZES = {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 16}
# Sums in another order: a few units in the last place of fp32, of logits of about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


NETS = {
    "gpt": (SimpleGPT, {"dropout": 0.1}),
    "llama": (Llama, {"n_kv_heads": 4, "d_ff": 40, "qk_norm": True}),
    "grouped": (Llama, {"n_kv_heads": 2, "d_ff": 40}),
}


@pytest.fixture(params=NETS)
def net(request) -> torch.nn.Module:
    made, options = NETS[request.param]
    net = made(**SIZES, **options).eval()
    for parameter in net.parameters():  # weights of a net that has learned, biases too
        torch.nn.init.normal_(parameter, std=0.2)
    return net.requires_grad_(False)


@pytest.mark.parametrize("parts", [[1] * 16, [5, 1, 1, 6, 3], [15, 1]], ids=str)
def test_tokens_given_in_parts_have_the_logits_of_the_whole(net, parts):
    tokens, cache = torch.randint(97, (3, 16)), net.new_cache()
    logits = [net(part, cache) for part in tokens.split(parts, dim=1)]
    assert [one.shape for one in logits] == [(3, n, 97) for n in parts]
    torch.testing.assert_close(torch.cat(logits, 1), net(tokens), **CLOSE)
    assert cache.length == 16


def test_memory_is_taken_for_at_most_twice_the_positions_and_rarely(net):
    cache, sizes = net.new_cache(), []
    for token in torch.randint(97, (2, 16)).split(1, dim=1):
        net(token, cache)
        sizes.append(cache.layers[1].k.shape[2])
    assert all(n <= size <= 2 * n for n, size in enumerate(sizes, 1)) and len(set(sizes)) <= 5


def test_a_cache_takes_the_type_that_attention_computes_in(net):
    tokens, cache = torch.randint(97, (2, 8)), net.new_cache()
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.cat([net(part, cache) for part in tokens.split(4, dim=1)], 1)
        whole = net(tokens)
    assert cache.layers[0].k.dtype == torch.bfloat16
    # bf16 has 8 bits of mantissa; logits are of about 10
    torch.testing.assert_close(logits, whole, rtol=0, atol=0.25)
    net.double()
    net(tokens, cache := net.new_cache())
    assert cache.layers[0].v.dtype == torch.float64


def test_a_full_cache_is_refused_by_both_numbers(net):
    cache = net.new_cache()
    net(torch.zeros(1, 16, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match=r"17 tokens.*max_seq_len=16"):
        net(torch.zeros(1, 1, dtype=torch.int64), cache)


def test_without_a_cache_the_parts_of_a_net_get_one_argument_each(net):
    seen = []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs)))
    net(torch.zeros(1, 2, dtype=torch.int64))
    assert seen == [1, 1, 1]

"""The nets that ship: what they compute, and initial weights that depend on the seed alone."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial

import pytest
import torch
from torch import nn

from gptrain.assemble.load import build_net
from gptrain.costs.net import net_of
from gptrain.lit.perf import count_matrix_weights
from gptrain.models import Llama, SimpleGPT
from gptrain.models.attention import (
    FLEX_MIN_D_HEAD,
    SequenceLayout,
    attend,
    document_block_mask,
    document_mask,
)
from gptrain.models.llama import RMSNorm
from gptrain.parallel.placement import allocate
from tests.command_line import compose_run

SIZES = {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 16}
# Sums in another order: a few units in the last place of fp32, of logits of about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PUBLISHED = {
    "gpt2": 124_439_808,
    "llama_1b": 1_235_814_400,  # Llama 3.2 1B
    "qwen3_4b": 4_022_468_096,
}


def small_gpt(**changes) -> SimpleGPT:
    return SimpleGPT(**{**SIZES, "dropout": 0.0, **changes})


def small_llama(**changes) -> Llama:
    return Llama(**{**SIZES, "n_kv_heads": 2, "d_ff": 40, "qk_norm": True, **changes})


NETS = {
    "gpt": partial(small_gpt, dropout=0.1),
    "llama": small_llama,
    "ungrouped": partial(small_llama, n_kv_heads=4, qk_norm=False),
    "tied": partial(small_llama, tie_head=True, d_head=12),
}


@pytest.fixture(params=NETS)
def make(request):
    return NETS[request.param]


@pytest.fixture
def net(make) -> nn.Module:
    """Return a net with random weights and biases, as after training."""
    net = make().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    return net.requires_grad_(False)


def random_tokens(batch: int = 3, time: int = 16) -> torch.Tensor:
    return torch.randint(97, (batch, time))


@pytest.mark.parametrize("preset", ["llama_nano", *PUBLISHED])
def test_a_preset_has_the_parameters_of_its_shape_and_of_what_it_is_called_after(preset):
    cfg = compose_run(f"model={preset}")
    with torch.device("meta"):
        net = build_net(cfg.model)
    sizes, n_parameters = net_of(cfg.model), sum(p.numel() for p in net.parameters())
    assert n_parameters == sizes.parameters(sizes.n_layers, True, True)
    assert n_parameters == PUBLISHED.get(preset, n_parameters)
    assert count_matrix_weights(net) == sizes.matrix_weights
    assert count_matrix_weights(nn.Conv1d(3, 5, 2)) == 3 * 5 * 2  # the bias does not count


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_logits_of_a_packed_document_are_those_of_the_document_alone(net):
    """The block mask of FlexAttention gives the same as the dense one."""
    tokens = random_tokens(batch=2)
    lengths = [[5, 1, 10], [9, 7]]
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    # An index is a name: the indices of the second sample fall.
    layout = SequenceLayout.of_documents(torch.stack([numbers[0], -numbers[1]]))
    packed = net(tokens, layout=layout)
    for row, row_lengths in enumerate(lengths):
        parts = zip(tokens[row].split(row_lengths), packed[row].split(row_lengths), strict=True)
        for document, logits in parts:
            torch.testing.assert_close(logits, net(document[None])[0], **CLOSE)
    flex = replace(layout, block_mask=document_block_mask(layout.documents))
    q, k, v = torch.randn(3, 2, 4, 16, FLEX_MIN_D_HEAD)  # (B, H, T, K)
    made = [attend(q, k[:, :2], v[:, :2], layout=chosen) for chosen in (layout, flex)]
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("n_tokens", [100, 256, 600])
def test_the_block_mask_of_documents_is_that_of_all_pairs_of_tokens(n_tokens):
    """Documents end in a block, at its end, and after several blocks; their indices fall."""
    from torch.nn.attention.flex_attention import create_block_mask  # loads torch's compiler

    ends = torch.tensor([[30, 128, 140, 600], [250, 256, 512, 590]])
    documents = -torch.searchsorted(ends, torch.arange(n_tokens).expand(2, -1), right=True)
    made = document_block_mask(documents)
    dense = document_mask(documents)
    expected = create_block_mask(
        lambda sample, _, query, key: dense[sample, 0, query, key],
        *(2, None, n_tokens, n_tokens, "cpu"),
    )
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    assert torch.equal(made.to_dense(), expected.to_dense())
    assert made.seq_lengths == expected.seq_lengths == (n_tokens, n_tokens)


def test_future_tokens_do_not_change_past_logits(net):
    tokens = random_tokens()
    for changed in (0, 7, 15):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % 97
        before, after = net(tokens), net(other)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.allclose(before[:, changed], after[:, changed])


@torch.no_grad()
def test_half_of_the_attention_weights_are_dropped_and_the_rest_doubled():
    """Values of 1 make the output the sum of the weights: of the first position its own weight."""
    attention = small_gpt(dropout=0.5).blocks[0].attention
    nn.init.zeros_(attention.v_proj.weight)
    nn.init.ones_(attention.v_proj.bias)
    nn.init.eye_(attention.out_proj.weight)
    x = torch.randn(64, 16, 32)
    layout = SequenceLayout.of_documents(torch.arange(16).expand(64, 16) // 4)
    for documents in (None, layout):
        first = attention.train()(x, layout=documents)[:, 0]  # (B, D)
        assert set(first.unique().tolist()) == {0.0, 2.0}
        assert 0.35 < first.mean() / 2 < 0.65  # 256 heads: 5 standard deviations
        torch.testing.assert_close(attention.eval()(x, layout=documents), torch.ones(64, 16, 32))


def test_every_matrix_and_every_norm_has_a_role_in_the_tensor_plan(net):
    modules = dict(net.named_modules())
    for name, module in modules.items():
        if isinstance(module, nn.Linear | nn.RMSNorm | nn.LayerNorm | nn.Embedding):
            assert sum(fnmatch(name, pattern) for pattern in net.tensor_plan) == 1, name


# Initial weights


def test_initial_weights_are_gpt2s():
    net = SimpleGPT(1000, d_model=128, n_heads=4, n_layers=8, max_seq_len=64)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("out_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            # standard error of a deviation is std / sqrt(2n); n >= 8192, so 5 % is 6 of them
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 6 * std / math.sqrt(parameter.numel()), name


def test_no_two_matrices_get_the_same_numbers_nor_two_seeds():
    nets = (small_gpt(), small_gpt(), small_llama())  # the head of the last is not tied
    matrices = [p for net in nets for p in net.parameters() if p.ndim == 2]
    heads = [p.flatten()[:8] / p.flatten()[:8].norm() for p in matrices]
    assert all(not torch.allclose(a, b) for i, a in enumerate(heads) for b in heads[:i])


def test_a_net_takes_one_random_number_and_on_the_meta_device_gets_the_same_weights(make):
    """The weights may be made one at a time in any order, and a tied head stays tied."""
    torch.manual_seed(3)
    expected = make()
    state, draw = expected.state_dict(), torch.rand(())
    torch.manual_seed(3)
    torch.randint(2**62, ())
    assert draw == torch.rand(())
    torch.manual_seed(3)
    with torch.device("meta"):
        net = make()
    assert draw == torch.rand(()) and all(p.is_meta for p in net.parameters())
    allocate(net, "cpu")
    for name, parameter in sorted(net.named_parameters(), reverse=True):
        net.init_parameter(name, parameter)
    assert all(torch.equal(state[name], made) for name, made in net.state_dict().items())
    is_tied = net.head.weight is net.token_embedding.weight
    assert is_tied == (expected.head.weight is expected.token_embedding.weight)


# Llama's parts


def test_attention_depends_on_distances_and_not_on_positions():
    attention = small_llama(qk_norm=False).blocks[0].attention
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 40, 1, 8)  # (B, T, H, K)
    turned_q, turned_k = (part[0, :, 0] for part in attention.apply_positions(q, k, 0))
    products = turned_q @ turned_k.mT  # (T, T)
    for distance in (0, 1, 7):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(products[0, 0], products[0, 7])


def test_positions_are_exact_also_where_torchs_default_type_has_16_bit():
    """trainer.precision=bf16-true sets this default, and bf16 has no odd integers above 256."""
    attention = small_llama(qk_norm=False).blocks[0].attention
    q, k = torch.randn(2, 1, 600, 1, 8)  # (B, T, H, K)
    expected = attention.apply_positions(q, k, 0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        turned = attention.apply_positions(q, k, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(turned, expected, rtol=0, atol=0)
    half = [x.to(torch.bfloat16) for x in (q, k)]
    turned = attention.apply_positions(*half, 0)
    expected = attention.apply_positions(*(x.float() for x in half), 0)
    assert all(torch.equal(x, y.to(x)) for x, y in zip(turned, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_has_torchs_values_and_gradients(dtype):
    norm, x = RMSNorm(24, 1e-5).to(dtype), torch.randn(3, 5, 24, dtype=dtype, requires_grad=True)
    nn.init.normal_(norm.weight)
    made = [norm(x), nn.functional.rms_norm(x, (24,), norm.weight, 1e-5)]
    gradients = [torch.autograd.grad(y.sin().sum(), (x, norm.weight)) for y in made]
    torch.testing.assert_close(*made)
    torch.testing.assert_close(*gradients)
    half = x.to(torch.bfloat16)  # under autocast the input may have fewer bits than the weight
    assert torch.equal(norm(half), norm(half.to(dtype))) and norm(half).dtype == dtype


# Keys and values that are kept


@pytest.mark.parametrize("parts", [[1] * 16, [5, 1, 1, 6, 3]], ids=str)
def test_tokens_given_in_parts_have_the_logits_of_the_whole(net, parts):
    tokens, cache = random_tokens(), net.new_cache()
    logits = [net(part, cache) for part in tokens.split(parts, dim=1)]
    assert [part.shape for part in logits] == [(3, n, 97) for n in parts]
    torch.testing.assert_close(torch.cat(logits, 1), net(tokens), **CLOSE)
    assert cache[0].length == 16
    with pytest.raises(ValueError, match=r"17 tokens.*max_seq_len=16"):
        net(tokens[:, :1], cache)


def test_a_cache_takes_the_type_that_attention_computes_in(net):
    tokens, cache = random_tokens(2, 8), net.new_cache()
    with torch.autocast("cpu", torch.bfloat16):  # a warning would fail the test
        logits = torch.cat([net(part, cache) for part in tokens.split(4, dim=1)], 1)
        whole = net(tokens)
    assert cache[0].k.dtype == whole.dtype == torch.bfloat16
    # bf16 has 8 bits of mantissa, and logits are about 10
    torch.testing.assert_close(logits, whole, rtol=0, atol=0.25)
    net.double()
    net(tokens, cache := net.new_cache())
    assert cache[0].v.dtype == torch.float64

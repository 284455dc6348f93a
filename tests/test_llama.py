"""Llama is the net that transformers calls so, and its initial weights depend on the seed alone."""

from __future__ import annotations

from fnmatch import fnmatch
from functools import partial

import pytest
import torch
from torch import nn

from gptrain.config import compose_command
from gptrain.costs.shape import find_shape
from gptrain.lit.perf import count_matrix_weights
from gptrain.models import Llama, SimpleGPT
from gptrain.models.rms_norm import RMSNorm
from gptrain.nets.load import build_net
from gptrain.parallel.activation import apply_activation_checkpointing

SMALL = {
    "vocab_size": 97, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "d_ff": 40,
    "max_seq_len": 64, "qk_norm": True,
}  # fmt: skip
PUBLISHED = {"llama_1b": 1_235_814_400, "llama_8b": 8_030_261_248}  # Llama 3.2 1B, Llama 3 8B


def small_llama(**changes) -> Llama:
    return Llama(**{**SMALL, **changes}).eval()


MAKE = (
    partial(small_llama, tie_head=True), small_llama, lambda: SimpleGPT(97, 32, 4, 2, 16),
)  # fmt: skip


def random_tokens(batch: int = 3, time: int = 16) -> torch.Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, time))


@pytest.mark.parametrize("preset", ["llama_nano", "llama_124m", "llama_1b", "llama_8b"])
def test_a_preset_has_the_parameters_of_its_shape_and_of_what_it_is_called_after(preset):
    cfg = compose_command([f"model={preset}"])
    with torch.device("meta"):
        net = build_net(cfg)
    shape, n_parameters = find_shape(cfg.model), sum(p.numel() for p in net.parameters())
    assert n_parameters == shape.n_parameters == PUBLISHED.get(preset, n_parameters)
    assert count_matrix_weights(net) == shape.matrix_weights


def test_logits_have_one_row_per_token_and_future_tokens_do_not_change_past_ones():
    net, tokens = small_llama(), random_tokens()
    other = tokens.clone()
    other[:, 7] = (other[:, 7] + 1) % 97
    before, after = net(tokens), net(other)
    assert before.shape == (3, 16, 97)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])


def test_attention_depends_on_distances_and_not_on_positions():
    attention = small_llama(qk_norm=False).blocks[0].attention
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 40, 1, 8)  # (B, T, H, K)
    turned_q, turned_k = (part[0, :, 0] for part in attention.place(q, k, 0))
    products = turned_q @ turned_k.mT  # (T, T)
    for distance in (0, 1, 7):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(products[0, 0], products[0, 7])


def test_positions_are_exact_also_where_torchs_default_type_has_16_bit():
    """As under trainer.precision=bf16-true: bf16 counts no further than 256."""
    attention = small_llama(qk_norm=False).blocks[0].attention
    q, k = torch.randn(2, 1, 600, 1, 8)  # (B, T, H, K)
    expected = attention.place(q, k, 0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        turned = attention.place(q, k, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(turned, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_has_torchs_values_and_gradients(dtype):
    norm, x = RMSNorm(24, 1e-5).to(dtype), torch.randn(3, 5, 24, dtype=dtype, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    made = [norm(x), nn.functional.rms_norm(x, (24,), norm.weight, 1e-5)]
    gradients = [torch.autograd.grad(y.sin().sum(), (x, norm.weight)) for y in made]
    torch.testing.assert_close(*made)
    torch.testing.assert_close(*gradients)


def test_recomputed_activations_are_the_same():
    gradients = []
    for recomputes in ("none", "full"):
        torch.manual_seed(0)
        net = small_llama()
        apply_activation_checkpointing(net, recomputes)
        net(random_tokens()).square().sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_bf16_products_are_taken_without_a_warning():
    with torch.autocast("cpu", torch.bfloat16):
        logits = small_llama()(random_tokens())
    assert logits.dtype == torch.bfloat16


@pytest.mark.parametrize("make", MAKE, ids=("tied", "untied", "gpt"))
def test_a_net_made_on_the_meta_device_gets_the_same_weights_in_any_order(make):
    torch.manual_seed(3)
    expected = make()
    state, draw = expected.state_dict(), torch.rand(())
    torch.manual_seed(3)
    with torch.device("meta"):
        net = make()
    assert torch.equal(draw, torch.rand(())) and all(p.is_meta for p in net.parameters())
    net.to_empty(device="cpu")
    for name, parameter in reversed(net.state_dict().items()):
        net.init_parameter(name, parameter)
    assert all(torch.equal(state[name], made) for name, made in net.state_dict().items())
    is_tied = net.head.weight is net.token_embedding.weight
    assert is_tied == (expected.head.weight is expected.token_embedding.weight)


@pytest.mark.parametrize("sizes", [{"n_kv_heads": 3}, {"d_model": 36}])
def test_sizes_that_cannot_be_built_are_refused(sizes):
    with pytest.raises(ValueError, match=r"n_kv_heads=3.*n_heads=4|n_heads=4: d_model=36"):
        small_llama(**sizes)
    with pytest.raises(ValueError, match=r"65 tokens.*max_seq_len=64"):
        small_llama()(random_tokens(1, 65))


@pytest.mark.parametrize("make", MAKE[1:], ids=("llama", "gpt"))
def test_every_matrix_and_every_norm_has_a_role_in_the_tensor_plan(make):
    modules = dict(make().named_modules())
    for name, module in modules.items():
        if isinstance(module, nn.Linear | nn.RMSNorm | nn.LayerNorm | nn.Embedding):
            assert sum(fnmatch(name, pattern) for pattern in make().tensor_plan) == 1, name
    for pattern in make().tensor_plan:
        assert any(fnmatch(name, pattern) for name in modules), pattern

"""The recipe `lora`: small checkpoints, exact resumes, and exports that compute the same."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from gptrain.export.files import write_net
from gptrain.parallel.placement import make_net_on
from recipes.lora import LoRALinear, adapters, with_adapters

SIZES = {"vocab_size": 256, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "n_layers": 2, "d_ff": 32}


def test_an_adapter_adds_its_product_times_alpha_over_rank_and_can_be_merged():
    torch.manual_seed(0)
    plain, x = torch.nn.Linear(6, 4), torch.randn(3, 6)
    layer = LoRALinear(plain, rank=2, alpha=8.0)
    assert torch.equal(layer(x), plain(x))  # B is 0
    torch.nn.init.normal_(layer.lora_b)
    expected = plain(x) + 4.0 * x @ layer.lora_a.T @ layer.lora_b.T
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.merged()(x), expected)
    # A strategy initializes one parameter at a time.
    arguments = {**SIZES, "max_seq_len": 64}
    make = partial(with_adapters, "Llama", 4, 8.0, ["*.q_proj"], **arguments)
    for adapter in adapters(make_net_on("cpu", make, lambda net: None)).values():
        assert adapter.lora_a.any() and not adapter.lora_b.any()


def test_the_adapters_are_exported_under_the_names_of_peft(tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    net = with_adapters("Llama", 4, 8.0, ["*.q_proj"], **SIZES, max_seq_len=64)
    layers = [layer for _, layer in sorted(adapters(net).items())]
    weights = [p for layer in layers for p in (layer.lora_a, layer.lora_b)]
    for weight in weights:
        torch.nn.init.normal_(weight)
    other = with_adapters("Llama", 4, 8.0, ["*.q_proj"], **SIZES, max_seq_len=64)
    other.load_state_dict(net.state_dict())
    _, merged = other.to_hugging_face()
    for i, layer in enumerate(layers):
        weight = merged[f"model.layers.{i}.self_attn.q_proj.weight"]
        torch.testing.assert_close(weight, layer.weight + 2.0 * layer.lora_b @ layer.lora_a)
    assert not any("lora" in name for name in merged)
    n_bytes = write_net(net, tmp_path, "peft", "bf16")
    assert n_bytes == 2 * sum(weight.numel() for weight in weights)
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8.0, "bias": "none",
        "target_modules": [f"model.layers.{i}.self_attn.q_proj" for i in range(2)],
    }  # fmt: skip
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for i, layer in enumerate(layers):
        for kind, weight in (("A", layer.lora_a), ("B", layer.lora_b)):
            name = f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{kind}.weight"
            torch.testing.assert_close(tensors.pop(name), weight.bfloat16(), rtol=0, atol=0)
    assert not tensors

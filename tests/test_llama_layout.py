"""Llama's weights travel to transformers and back: equal logits, the same bits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gptrain.export.files import write_net
from gptrain.models import Llama
from gptrain.nets.weights import load_weights

SIZES = {"vocab_size": 97, "d_model": 48, "n_heads": 6, "n_layers": 2, "d_ff": 40}
NETS = {
    "grouped": {"n_kv_heads": 2},
    "tied": {"n_kv_heads": 6, "tie_head": True, "rope_base": 1e4, "norm_eps": 1e-6},
    "scaled": {"n_kv_heads": 1, "rope_scaling": 8.0, "rope_base": 1e6},
    "normalised": {"n_kv_heads": 2, "qk_norm": True},
}
# The same sums in another order: a few units in the last place of fp32, of logits of about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def make(name: str, **changes) -> Llama:
    """A net whose weights are not those of the start."""
    net = Llama(**{**SIZES, "max_seq_len": 4096, **NETS[name], **changes}).eval()
    for key, parameter in net.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in key), std=0.15)
    return net.requires_grad_(False)


@pytest.mark.parametrize("name", NETS)
def test_an_export_gives_the_same_logits_in_transformers_and_the_same_bits_back(tmp_path, name):
    net, back = make(name), make(name)
    write_net(net, tmp_path, "hf", "fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if net.qk_norm else "LlamaForCausalLM")
    tokens = torch.randint(97, (2, 300))  # long enough for slow rotations to be seen
    torch.testing.assert_close(theirs(tokens).logits, net(tokens), **CLOSE)
    load_weights(back, tmp_path)
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key


def test_a_llama_saved_by_transformers_gives_the_same_logits_here(tmp_path):
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, num_attention_heads=6, num_key_value_heads=2,
        num_hidden_layers=2, intermediate_size=40, rms_norm_eps=1e-5, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    net, tokens = make("grouped", rope_base=1e4), torch.arange(97)
    load_weights(net, tmp_path)
    torch.testing.assert_close(net(tokens[None]), theirs(tokens[None]).logits, **CLOSE)


def test_names_of_an_older_transformers_are_read(tmp_path):
    net = make("scaled")
    write_net(net, tmp_path, "hf", "fp32")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["rope_scaling"]["type"] = config["rope_scaling"]["rope_type"]
    del config["head_dim"], config["use_sliding_window"]
    file.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(make("scaled"), tmp_path)


def test_what_does_not_fit_is_one_line_with_both_sides(tmp_path):
    write_net(make("grouped"), tmp_path, "hf", "fp32")
    with pytest.raises(ValueError, match=r"heads=2 there, 3 here; rms.*=1e-05 there, 1e-06 here$"):
        load_weights(make("grouped", n_kv_heads=3, norm_eps=1e-6), tmp_path)
    with pytest.raises(ValueError, match=r"rope_parameters=.*500000.* there, .*10000.* here$"):
        load_weights(make("grouped", rope_base=1e4), tmp_path)
    with pytest.raises(ValueError, match=r"model_type=llama there, qwen3 here$"):
        load_weights(make("grouped", qk_norm=True), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model_type=None there, llama here"):
        load_weights(make("grouped"), tmp_path)

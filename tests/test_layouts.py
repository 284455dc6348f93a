"""Weights travel to transformers and back: equal logits, the same bits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gptrain.assemble.load import find_weights, load_weights
from gptrain.core.errors import DataError
from gptrain.export.files import write_net
from gptrain.models import Llama, SimpleGPT

GPT2 = {"vocab_size": 97, "d_model": 36, "n_heads": 3, "n_layers": 2, "max_seq_len": 300}
LLAMA = {"vocab_size": 97, "d_model": 48, "n_heads": 6, "n_layers": 2, "d_ff": 40}
LLAMA |= {"max_seq_len": 4096, "n_kv_heads": 2}
NETS = {
    "gpt2": {"activation": "gelu_tanh"},
    "one head": {"n_heads": 1, "activation": "gelu", "dropout": 0.1},
    "grouped": {},
    "tied": {"n_kv_heads": 6, "tie_head": True, "rope_base": 1e4, "norm_eps": 1e-6},
    "scaled": {"n_kv_heads": 1, "rope_scaling": 8.0, "rope_base": 1e6},
    "normalised": {"qk_norm": True, "norm_eps": 0.1},  # seen in every norm
    "wide heads": {"qk_norm": True, "d_head": 16, "tie_head": True},  # like Qwen3-0.6B and 4B
}
# Sums in another order differ by a few units in the last place of fp32. Logits are about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TOKENS = torch.arange(600).view(2, 300) * 31 % 97  # long enough for slow rotations to be seen
THEIRS = {
    "gpt2": {"model_type": "gpt2", "n_embd": 36, "n_head": 3, "n_layer": 2, "n_positions": 300},
    "grouped": {
        "model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, "rms_norm_eps": 1e-5,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40,
    },
}  # fmt: skip


def learned(net: nn.Module) -> nn.Module:
    """The net with weights, biases too, that are not those of the start."""
    for name, parameter in net.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name or "ln_" in name), std=0.15)
    return net.eval().requires_grad_(False)


def make(name: str, **changes) -> nn.Module:
    if "activation" in NETS[name]:
        return learned(SimpleGPT(**{**GPT2, "dropout": 0.0, **NETS[name], **changes}))
    return learned(Llama(**{**LLAMA, **NETS[name], **changes}))


@pytest.mark.engine("transformers")
@pytest.mark.parametrize("name", NETS)
def test_an_export_gives_the_same_logits_in_transformers_and_the_same_bits_back(tmp_path, name):
    from transformers import AutoModelForCausalLM

    net, back = make(name), make(name)
    write_net(net, tmp_path, "hf", "fp32")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(reference(TOKENS).logits, net(TOKENS), **CLOSE)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(reference).__name__]
    if isinstance(net, SimpleGPT):
        dropouts = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
        assert {getattr(reference.config, key) for key in dropouts} == {net.dropout.p}
    assert ("Qwen3" in type(reference).__name__) == ("qk_norm" in NETS[name])
    load_weights(back, find_weights(tmp_path))
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key


@pytest.mark.engine("transformers")
@pytest.mark.parametrize("name", THEIRS)
def test_files_of_transformers_are_read_and_a_missing_one_is_told(tmp_path, name):
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None, **THEIRS[name]}
    reference = learned(AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys)))
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    net = make(name, **({} if name == "gpt2" else {"rope_base": 1e4}))
    load_weights(net, find_weights(tmp_path))
    torch.testing.assert_close(net(TOKENS), reference(TOKENS).logits, **CLOSE)
    files[1].unlink()
    with pytest.raises(DataError, match=f"is one of {len(files) - 1} files"):
        load_weights(net, find_weights(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    files[0].rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(DataError, match=r"config\.json"):
        load_weights(net, find_weights(tmp_path))
    torch.save([1], tmp_path / "x.ckpt")
    with pytest.raises(DataError, match=r"x\.ckpt"):
        load_weights(net, tmp_path / "x.ckpt")


# Keys whose values are the defaults of transformers 4: LlamaConfig and GPT2Config may lack them.
DEFAULTS_OF_LLAMA = (
    "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act", "num_key_value_heads", "head_dim",
    "attention_bias", "mlp_bias", "use_sliding_window",
)  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "scaled", "tied"])
def test_names_and_buffers_of_older_files_are_read(tmp_path, name):
    net, back = make(name), make(name)
    write_net(net, tmp_path, "hf", "fp32")
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    if name == "gpt2":
        tensors = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 300, 300)
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        del config["activation_function"]  # the default is gelu_new
        config["n_inner"] = 4 * 36  # the default, written as a number
    elif name == "tied":
        for key in DEFAULTS_OF_LLAMA:
            del config[key]
        other = make(name, n_kv_heads=3, norm_eps=1e-5, rope_base=5e5)
        with pytest.raises(
            ValueError, match=r"heads=6 .* 3 in.*eps=1e-06 .* 1e-05 .*10000.*500000"
        ):
            other.from_hugging_face(config, tensors)
    else:
        config["rope_scaling"]["type"] = config["rope_scaling"]["rope_type"]
        del config["head_dim"], config["use_sliding_window"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(back, find_weights(tmp_path))
    assert torch.equal(back(TOKENS), net(TOKENS))
    if name == "gpt2":
        back.from_hugging_face(
            config | {"activation_function": "gelu_pytorch_tanh"}, tensors
        )  # gelu_new
        # A net with more positions takes those that are in the file.
        longer = make(name, max_seq_len=net.max_seq_len + 3)
        load_weights(longer, find_weights(tmp_path), resizes=True)
        assert torch.equal(longer(TOKENS), net(TOKENS))


@pytest.mark.parametrize(
    "name, config_keys, net_keys, message",
    [
        ("gpt2", {"n_head": 6, "activation_function": "relu"}, {},
         "n_head=6 in the config, 3 in the net; .*function=relu in the config, gelu_new in"),
        ("gpt2", {"layer_norm_epsilon": 1e-6, "scale_attn_weights": False,
                  "add_cross_attention": True, "tie_word_embeddings": False}, {},
         "epsilon=1e-06 in .*; scale_attn_weights=False .*; add_cross_attention=True .*; tie_word"),
        ("grouped", {}, {"n_kv_heads": 3, "norm_eps": 1e-6},
         r"heads=2 in the config, 3 in the net; rms.*=1e-05 in the config, 1e-06 in the net$"),
        ("grouped", {}, {"rope_base": 1e4, "qk_norm": True}, r"model_type=llama in .*, qwen3 in "
         r"the net; rope_theta=500000.* in the config, 10000.* in the net$"),
        ("grouped", {"model_type": None}, {}, "model_type=None in the config, llama in the net"),
        ("grouped", {"hidden_act": "gelu", "attention_bias": True, "mlp_bias": True,
                     "use_sliding_window": True}, {},
         "act=gelu in the config, silu in .*; attention_bias=True in .*; mlp_bias=True in .*; "
         "use_sliding_window=True in the config"),
    ],
)  # fmt: skip
def test_config_differences_that_shapes_do_not_show_are_one_line(
    tmp_path, name, config_keys, net_keys, message
):
    write_net(make(name), tmp_path, "hf", "fp32")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | config_keys))
    with pytest.raises(ValueError, match=message):
        load_weights(make(name, **net_keys), find_weights(tmp_path))

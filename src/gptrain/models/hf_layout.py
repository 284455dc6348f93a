"""Weights of SimpleGPT and Llama in the layouts of Hugging Face transformers, and back.

SimpleGPT's layout is that of GPT2LMHeadModel. Llama's is that of Qwen3ForCausalLM if q and k are
normalized, and of LlamaForCausalLM otherwise. Source: huggingface/transformers.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gptrain.models.decoder import Decoder

LLAMA3_CONTEXT = 8192  # context length of Llama 3, which the RoPE scaling of 3.1 and 3.2 extends
_QWEN3_D_HEAD = 128  # width of a head if a Qwen3 config does not name it
Config: TypeAlias = Mapping[str, Any]  # content of a config.json
Tensors: TypeAlias = Mapping[str, Tensor]
_Table: TypeAlias = dict[str, list[str]]
# Layer of transformers -> layers of gptrain, concatenated along the outputs. * is a block's index.
_GPT2: _Table = {
    "transformer.wte": ["token_embedding"],
    "transformer.wpe": ["position_embedding"],
    "transformer.h.*.ln_1": ["blocks.*.norm_1"],
    "transformer.h.*.ln_2": ["blocks.*.norm_2"],
    "transformer.h.*.attn.c_attn": [f"blocks.*.attention.{part}_proj" for part in "qkv"],
    "transformer.h.*.attn.c_proj": ["blocks.*.attention.out_proj"],
    "transformer.h.*.mlp.c_fc": ["blocks.*.mlp.up_proj"],
    "transformer.h.*.mlp.c_proj": ["blocks.*.mlp.down_proj"],
    "transformer.ln_f": ["norm"],
    "lm_head": ["head"],
}
_LLAMA: _Table = {
    "model.embed_tokens": ["token_embedding"],
    "model.layers.*.input_layernorm": ["blocks.*.norm_1"],
    "model.layers.*.post_attention_layernorm": ["blocks.*.norm_2"],
    **{f"model.layers.*.self_attn.{p}_proj": [f"blocks.*.attention.{p}_proj"] for p in "qkv"},
    "model.layers.*.self_attn.o_proj": ["blocks.*.attention.out_proj"],
    **{f"model.layers.*.self_attn.{p}_norm": [f"blocks.*.attention.norm_{p}"] for p in "qk"},
    **{f"model.layers.*.mlp.{p}_proj": [f"blocks.*.mlp.{p}_proj"] for p in ("gate", "up", "down")},
    "model.norm": ["norm"],
    "lm_head": ["head"],
}
_TRANSPOSED = re.compile(r".*\.c_\w+\.weight")  # GPT-2's projections are (inputs, outputs)
_CONSTANTS = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)")  # in old files
# Keys to which the nets have no alternative, with the value that a missing key stands for.
_FIXED_GPT2 = {
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_weights": True,
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), False),
    "tie_word_embeddings": True,
}
_FIXED_LLAMA = {
    "hidden_act": "silu",
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False),
}


def to_gpt2(net: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of the GPT2LMHeadModel that computes the same as a SimpleGPT.

    Both are by the names of transformers. The tensors share memory with the net, but the joined
    q, k and v are copies.
    """
    config = _gpt2_config(net) | {"n_positions": net.max_seq_len}
    config["architectures"] = ["GPT2LMHeadModel"]
    dropout = net.get_submodule("dropout").p
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return config, _to_layout(net, _GPT2)


def from_gpt2(net: Decoder, config: Config, tensors: Tensors) -> dict[str, Tensor]:
    """Return a state dict for a SimpleGPT from the weights of a GPT2LMHeadModel or GPT2Model.

    The result has views of `tensors`. Constants of old files are left out. Unknown tensors keep
    their names and missing ones are missing, also a tied head, so that the caller can report both.

    Args:
        net: SimpleGPT, whose sizes are compared. It is not changed.
        config: Content of the config.json.
        tensors: Tensors by the names of transformers.

    Raises:
        ValueError: If the config is that of another net. The number of positions is not compared.
    """
    completed = {**_FIXED_GPT2, "activation_function": "gelu_new", **config}
    if completed["n_inner"] == 4 * net.d_model:
        completed["n_inner"] = None
    if completed["activation_function"] == "gelu_pytorch_tanh":
        completed["activation_function"] = "gelu_new"
    _check_same(completed, _gpt2_config(net))
    return _from_layout(net, _GPT2, tensors)


def to_llama(net: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of the transformers model that computes the same as a Llama.

    Both are by the names of transformers: of Qwen3ForCausalLM with `qk_norm`, else of
    LlamaForCausalLM. The tensors share memory with the net.
    """
    config = _llama_config(net) | {"max_position_embeddings": net.max_seq_len}
    config["architectures"] = ["Qwen3ForCausalLM" if net.qk_norm else "LlamaForCausalLM"]
    return config, _to_layout(net, _LLAMA)


def from_llama(net: Decoder, config: Config, tensors: Tensors) -> dict[str, Tensor]:
    """Return a state dict for a Llama from the weights of a LlamaForCausalLM or Qwen3ForCausalLM.

    Arguments, result and errors are those of `from_gpt2`, with a Llama as the net.
    """
    defaults = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, **_FIXED_LLAMA}
    completed = {**defaults, **config}
    d_head = _QWEN3_D_HEAD if config.get("model_type") == "qwen3" else None
    completed["head_dim"] = config.get("head_dim", d_head) or net.d_model // net.n_heads
    completed["num_key_value_heads"] = completed.get("num_key_value_heads") or net.n_heads
    # transformers 4 has rope_theta and rope_scaling, transformers 5 has both in rope_parameters.
    rope = {**(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    completed["rope_theta"] = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    completed["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    _check_same(completed, _llama_config(net))
    return _from_layout(net, _LLAMA, tensors)


def _gpt2_config(net: Decoder) -> dict[str, Any]:
    """Return the keys of GPT2Config that determine what the net computes."""
    return {
        "model_type": "gpt2",
        "vocab_size": net.vocab_size,
        "n_embd": net.d_model,
        "n_layer": net.n_layers,
        "n_head": net.n_heads,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[str(net.activation)],
        **_FIXED_GPT2,
    }


def _llama_config(net: Decoder) -> dict[str, Any]:
    """Return the keys of LlamaConfig or Qwen3Config that determine what the net computes."""
    rope: dict[str, Any] | None = None
    if net.rope_scaling != 1:
        rope = {"rope_type": "llama3", "factor": net.rope_scaling}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": LLAMA3_CONTEXT}
    return {
        "model_type": "qwen3" if net.qk_norm else "llama",
        "vocab_size": net.vocab_size,
        "hidden_size": net.d_model,
        "intermediate_size": net.d_ff,
        "num_hidden_layers": net.n_layers,
        "num_attention_heads": net.n_heads,
        "num_key_value_heads": net.n_kv_heads,
        "head_dim": net.d_head,
        "rms_norm_eps": net.norm_eps,
        "tie_word_embeddings": net.tie_head,
        "rope_theta": net.rope_base,
        "rope_scaling": rope,
        **_FIXED_LLAMA,
    }


def _check_same(config: Config, expected: Config) -> None:
    """Raise a ValueError with all keys of `expected` that `config` lacks or that differ in it."""
    differences = [
        f"{key}={config.get(key)} in the config, {value} in the net"
        for key, value in expected.items()
        if config.get(key) != value
    ]
    if differences:
        raise ValueError("; ".join(differences))


def _to_layout(net: Decoder, table: _Table) -> dict[str, Tensor]:
    """Return the tensors of a net by the names of transformers."""
    state, tensors = net.state_dict(), {}
    for name, parts in _names(net, table).items():
        if parts[0] in state:
            tensor = torch.cat([state[part] for part in parts]) if parts[1:] else state[parts[0]]
            tensors[name] = tensor.t() if _TRANSPOSED.fullmatch(name) else tensor
    return tensors


def _from_layout(net: Decoder, table: _Table, tensors: Tensors) -> dict[str, Tensor]:
    """Return a state dict of a net from tensors by the names of transformers."""
    names, state = _names(net, table), {}
    for name, tensor in tensors.items():
        if parts := names.get(name) or names.get(f"transformer.{name}"):
            tensor = tensor.t() if _TRANSPOSED.fullmatch(name) else tensor
            state |= zip(parts, tensor.chunk(len(parts)), strict=True)
        elif not _CONSTANTS.fullmatch(name):
            state[name] = tensor
    return state


def _names(net: Decoder, table: _Table) -> dict[str, list[str]]:
    """Return the name of each tensor in transformers -> the names of its parts in the net."""
    return {
        f"{layer}.{kind}".replace("*", str(block)): [
            f"{part}.{kind}".replace("*", str(block)) for part in parts
        ]
        for layer, parts in table.items()
        for block in (range(net.n_layers) if "*" in layer else [0])
        for kind in ("weight", "bias")
    }

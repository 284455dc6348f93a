"""Conversion of Llama's weights to the layout of Hugging Face's Llama or Qwen3 and back.

The layout is Qwen3's if q and k are normalized, and Llama's otherwise. All parameters differ by
name only. Source: LlamaForCausalLM and Qwen3ForCausalLM of huggingface/transformers.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gptrain.models.decoder import Decoder
from gptrain.models.gpt2_layout import check_same

LLAMA3_CONTEXT = 8192  # context length of Llama 3, which the RoPE scaling of 3.1 and 3.2 extends
QWEN3_D_HEAD = 128  # width of a head if a Qwen3 config does not name it
# gptrain's layer -> Hugging Face's layer
_LAYERS_OUTSIDE_BLOCKS = {
    "token_embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
_LAYERS_OF_BLOCK = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.out_proj": "self_attn.o_proj",
    "attention.norm_q": "self_attn.q_norm",
    "attention.norm_k": "self_attn.k_norm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
_ROPE_BUFFER = re.compile(r".*\.rotary_emb\.inv_freq")  # constants that old files contain
_UNSUPPORTED = ("attention_bias", "mlp_bias", "use_sliding_window")
_CONFIG_DEFAULTS = {  # values of keys that a config.json lacks
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    **dict.fromkeys(_UNSUPPORTED, False),
}


def to_llama(net: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of the transformers model that computes the same as `net`.

    The model is a LlamaForCausalLM, or a Qwen3ForCausalLM if q and k are normalized. The tensors
    are those of `net.state_dict()`, not copies. A tied head is left out.

    Args:
        net: A Llama.
    """
    config: dict[str, Any] = _config(net) | {
        "architectures": ["Qwen3ForCausalLM" if net.qk_norm else "LlamaForCausalLM"],
        "max_position_embeddings": net.max_seq_len,
        # LlamaConfig's default ids belong to one tokenizer.
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }
    # transformers 4 has rope_theta and rope_scaling, which transformers 5 also reads.
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if net.rope_scaling != 1 else None
    state = net.state_dict()
    if net.tie_head:
        del state["head.weight"]
    names = _names(net.n_layers)
    return config, {names[name]: tensor for name, tensor in state.items()}


def from_llama(
    net: Decoder, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a state dict for `net` from a LlamaForCausalLM or a Qwen3ForCausalLM.

    The state dict holds the given tensors, not copies. A tensor with an unknown name keeps its
    name, and a missing tensor is missing in the result, too, so that the caller can report both.
    Only the rotary constants of old files are left out.

    Args:
        net: A Llama.
        config: Content of config.json. `max_position_embeddings` may differ from the net.
        tensors: Tensors by name.

    Raises:
        ValueError: If `config` describes another net. One line lists all differences.
    """
    completed = {**_CONFIG_DEFAULTS, **config}
    default = QWEN3_D_HEAD if config.get("model_type") == "qwen3" else None
    completed["head_dim"] = config.get("head_dim", default) or net.d_model // net.n_heads
    completed["num_key_value_heads"] = completed.get("num_key_value_heads") or net.n_heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": "default", **rope}
    completed["rope_parameters"] = {key: rope[key] for key in rope if key != "type"}
    check_same(completed, _config(net))
    names = {hf_name: name for name, hf_name in _names(net.n_layers).items()}
    state = {
        names.get(hf_name, hf_name): tensor
        for hf_name, tensor in tensors.items()
        if not _ROPE_BUFFER.fullmatch(hf_name)
    }
    if net.tie_head and "token_embedding.weight" in state:
        state["head.weight"] = state["token_embedding.weight"]
    return state


def _config(net: Decoder) -> dict[str, Any]:
    """Return the keys of LlamaConfig or Qwen3Config that determine what the net computes."""
    rope: dict[str, Any] = {"rope_theta": net.rope_base, "rope_type": "default"}
    if net.rope_scaling != 1:
        rope |= {"rope_type": "llama3", "factor": net.rope_scaling}
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
        "rope_parameters": rope,
        "hidden_act": "silu",
        **dict.fromkeys(_UNSUPPORTED, False),
    }


def _names(n_layers: int) -> dict[str, str]:
    """Return gptrain's name of each parameter -> Hugging Face's name.

    Args:
        n_layers: Number of blocks.
    """
    layers = _LAYERS_OUTSIDE_BLOCKS | {
        f"blocks.{i}.{layer}": f"model.layers.{i}.{hf_layer}"
        for i in range(n_layers)
        for layer, hf_layer in _LAYERS_OF_BLOCK.items()
    }
    return {f"{layer}.weight": f"{hf_layer}.weight" for layer, hf_layer in layers.items()}

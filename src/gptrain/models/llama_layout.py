"""Llama's weights in the layout of Hugging Face's Llama, or Qwen3 where q and k are normalised.

All differs by name only. Source: LlamaForCausalLM and Qwen3ForCausalLM of huggingface/transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gptrain.models.decoder import Decoder
from gptrain.models.gpt2_layout import check_same

LLAMA3_CONTEXT = 8192  # positions of Llama 3, which 3.1 and 3.2 stretch
_OUTSIDE = {"token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INSIDE = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    **{f"attention.{one}_proj": f"self_attn.{one}_proj" for one in "qkv"},
    "attention.out_proj": "self_attn.o_proj",
    **{f"attention.norm_{one}": f"self_attn.{one}_norm" for one in "qk"},
    **{f"mlp.{one}_proj": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
}
_TABLE = re.compile(r".*\.rotary_emb\.inv_freq")  # buffers in old files; not learned
_NOT_HERE = ("attention_bias", "mlp_bias", "use_sliding_window", "tie_word_embeddings")
# Theirs where a config says nothing.
_ABSENT = {"rms_norm_eps": 1e-6, "hidden_act": "silu", **dict.fromkeys(_NOT_HERE, False)}


def to_llama(net: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the LlamaForCausalLM or Qwen3ForCausalLM that computes what net does.

    The tensors are views where the layout allows; a tied head is left out.
    """
    config: dict[str, Any] = _config(net) | {
        "architectures": ["Qwen3ForCausalLM" if net.qk_norm else "LlamaForCausalLM"],
        "max_position_embeddings": net.max_seq_len,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # theirs are those of one tokenizer
    }
    rope = config.pop("rope_parameters")  # transformers 5 reads the names of 4, too
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
    """A state dict for net from the config and tensors of one of the two, as views.

    Raises: ValueError, one line that names both sides of all sizes that do not fit.
    """
    theirs = {**_ABSENT, **config}
    theirs["head_dim"] = theirs.get("head_dim") or net.d_model // net.n_heads
    theirs["num_key_value_heads"] = theirs.get("num_key_value_heads") or net.n_heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": "default", **rope}
    theirs["rope_parameters"] = {key: rope[key] for key in rope if key != "type"}
    check_same(theirs, _config(net))
    names = {name: ours for ours, name in _names(net.n_layers).items()}
    state = {names.get(k, k): tensor for k, tensor in tensors.items() if not _TABLE.fullmatch(k)}
    if net.tie_head and "token_embedding.weight" in state:
        state["head.weight"] = state["token_embedding.weight"]
    return state


def _config(net: Decoder) -> dict[str, Any]:
    """What decides what a net computes, in their words."""
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
        "head_dim": net.d_model // net.n_heads,
        "rms_norm_eps": net.norm_eps,
        "tie_word_embeddings": net.tie_head,
        "rope_parameters": rope,
        "hidden_act": "silu",
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False),
    }


def _names(n_layers: int) -> dict[str, str]:
    """Ours -> theirs."""
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _OUTSIDE.items()}
    return names | {
        f"blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
        for i in range(n_layers)
        for ours, theirs in _INSIDE.items()
    }

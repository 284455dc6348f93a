"""SimpleGPT's weights in the layout of Hugging Face's GPT-2, and back.

There q, k and v are one `c_attn`, and a projection's matrix is (inputs, outputs), the transpose of
nn.Linear's. All else differs by name only. Source: GPT2LMHeadModel of huggingface/transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gptrain.models.decoder import Decoder

_OUTSIDE = {  # theirs -> ours
    "wte.weight": "token_embedding.weight",
    "wpe.weight": "position_embedding.weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
}
_INSIDE = {  # of a block; several of ours are the parts of one of theirs
    "ln_1": ("norm_1",),
    "ln_2": ("norm_2",),
    "attn.c_attn": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.c_proj": ("attention.out_proj",),
    "mlp.c_fc": ("mlp.up_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}
_TRANSPOSED = re.compile(r".*\.c_\w+\.weight")
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # buffers in old files; not learned
_FIXED = {  # theirs by default
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def to_gpt2(net: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the GPT2LMHeadModel that computes what net computes.

    The head is tied and therefore left out.
    """
    dropout = net.get_submodule("dropout").p
    config = {
        **_config(net),
        "architectures": ["GPT2LMHeadModel"],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # theirs are those of one tokenizer
    }
    state, tensors = net.state_dict(), {}
    for theirs, ours in _names(net.n_layers).items():
        whole = torch.cat([state[name] for name in ours])
        tensors[f"transformer.{theirs}"] = whole.t() if _TRANSPOSED.fullmatch(theirs) else whole
    return config, tensors


def from_gpt2(
    net: Decoder, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A state dict for net from the config and tensors of a GPT2LMHeadModel, as views.

    Args:
        config: of config.json, the only place of the number of heads and the activation.

    Raises: ValueError, one line that names both sides of all that does not fit.
    """
    there = {**_FIXED, "activation_function": "gelu_new", **config}
    if there["n_inner"] == 4 * net.d_model:
        there["n_inner"] = None
    if there["activation_function"] == "gelu_pytorch_tanh":
        there["activation_function"] = "gelu_new"
    here = _config(net)
    del here["n_positions"]  # the shape of the table says it, and init_from can resize it
    check_same(there, here)
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    theirs.pop("lm_head.weight", None)  # of old files: tied there too, as the config says
    state = {}
    for name, ours in _names(net.n_layers).items():
        if name in theirs:
            tensor = theirs.pop(name)
            whole = tensor.t() if _TRANSPOSED.fullmatch(name) else tensor
            state |= zip(ours, whole.chunk(len(ours)), strict=True)
    if "token_embedding.weight" in state:
        state["head.weight"] = state["token_embedding.weight"]
    return state | {name: theirs[name] for name in theirs if not _MASK.fullmatch(name)}


def check_same(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises: ValueError that names both sides of all that is here and not the same there."""
    message = [
        f"{key}={there.get(key)} there, {value} here"
        for key, value in here.items()
        if there.get(key) != value
    ]
    if message:
        raise ValueError("; ".join(message))


def _config(net: Decoder) -> dict[str, Any]:
    """What decides what a net computes, in their words."""
    return {
        "model_type": "gpt2",
        "vocab_size": net.vocab_size,
        "n_positions": net.max_seq_len,
        "n_embd": net.d_model,
        "n_layer": net.n_layers,
        "n_head": net.n_heads,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[str(net.activation)],
        **_FIXED,
    }


def _names(n_layers: int) -> dict[str, tuple[str, ...]]:
    """Theirs -> ours."""
    return {theirs: (ours,) for theirs, ours in _OUTSIDE.items()} | {
        f"h.{block}.{theirs}.{kind}": tuple(f"blocks.{block}.{name}.{kind}" for name in ours)
        for block in range(n_layers)
        for theirs, ours in _INSIDE.items()
        for kind in ("weight", "bias")
    }

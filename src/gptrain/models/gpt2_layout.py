"""Conversion of SimpleGPT's weights to the layout of Hugging Face's GPT-2 and back.

In GPT-2's layout q, k and v are one layer `c_attn`, and the weight of a projection has the shape
(inputs, outputs), the transpose of nn.Linear's. All other parameters differ by name only.
Source: GPT2LMHeadModel of huggingface/transformers.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gptrain.models.decoder import Decoder

_NAMES_OUTSIDE_BLOCKS = {  # Hugging Face's name -> gptrain's name
    "wte.weight": "token_embedding.weight",
    "wpe.weight": "position_embedding.weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
}
_LAYERS_OF_BLOCK = {  # Hugging Face's layer -> gptrain's layers, concatenated along the outputs
    "ln_1": ("norm_1",),
    "ln_2": ("norm_2",),
    "attn.c_attn": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.c_proj": ("attention.out_proj",),
    "mlp.c_fc": ("mlp.up_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}
_TRANSPOSED = re.compile(r".*\.c_\w+\.weight")
_MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # constants that old files contain
_FIXED_CONFIG = {  # defaults of GPT2Config to which SimpleGPT has no alternative
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def to_gpt2(net: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of the GPT2LMHeadModel that computes the same as `net`.

    The tensors are copies. The head, which is tied to the token embedding, is not among them.

    Args:
        net: A SimpleGPT, not partitioned.
    """
    dropout = net.get_submodule("dropout").p
    config = {
        **_config(net),
        "architectures": ["GPT2LMHeadModel"],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        # GPT2Config's default ids belong to GPT-2's tokenizer.
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }
    state = net.state_dict()
    tensors = {}
    for gpt2_name, names in _names(net.n_layers).items():
        tensor = torch.cat([state[name] for name in names])
        is_transposed = _TRANSPOSED.fullmatch(gpt2_name)
        tensors[f"transformer.{gpt2_name}"] = tensor.t() if is_transposed else tensor
    return config, tensors


def from_gpt2(
    net: Decoder, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a state dict for `net` from the config and the tensors of a GPT2LMHeadModel.

    The tensors of the state dict are views of `tensors`. A tensor with an unknown name keeps its
    name, and a missing tensor is missing in the result, too, so that the caller can report both.
    Only the head and the attention masks of old files are left out.

    Args:
        net: A SimpleGPT.
        config: Content of config.json. The tensors do not show the number of heads and the
            activation. `n_positions` may differ from the net.
        tensors: Tensors by name, with or without the prefix `transformer.`.

    Raises:
        ValueError: If `config` describes another net. One line lists all differences.
    """
    config = {**_FIXED_CONFIG, "activation_function": "gelu_new", **config}
    if config["n_inner"] == 4 * net.d_model:
        config["n_inner"] = None
    if config["activation_function"] == "gelu_pytorch_tanh":
        config["activation_function"] = "gelu_new"
    expected = _config(net)
    # The shape of the position table shows n_positions, and init_from can resize the table.
    del expected["n_positions"]
    check_same(config, expected)
    remaining = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    # Old files contain the head. The config was checked: the head is the token embedding.
    remaining.pop("lm_head.weight", None)
    state = {}
    for gpt2_name, names in _names(net.n_layers).items():
        if gpt2_name in remaining:
            tensor = remaining.pop(gpt2_name)
            if _TRANSPOSED.fullmatch(gpt2_name):
                tensor = tensor.t()
            state |= zip(names, tensor.chunk(len(names)), strict=True)
    if "token_embedding.weight" in state:
        state["head.weight"] = state["token_embedding.weight"]
    unknown = {name: remaining[name] for name in remaining if not _MASK_BUFFER.fullmatch(name)}
    return state | unknown


def check_same(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a folder's config describes the net.

    Args:
        config: Content of the folder's config.json. Only the keys of `expected` are compared; a
            missing key counts as None.
        expected: Config of the net.

    Raises:
        ValueError: If a value differs. The message lists both values of every such key.
    """
    differences = [
        f"{key}={config.get(key)} in the config, {value} in the net"
        for key, value in expected.items()
        if config.get(key) != value
    ]
    if differences:
        raise ValueError("; ".join(differences))


def _config(net: Decoder) -> dict[str, Any]:
    """Return the keys of transformers' GPT2Config that determine what the net computes."""
    return {
        "model_type": "gpt2",
        "vocab_size": net.vocab_size,
        "n_positions": net.max_seq_len,
        "n_embd": net.d_model,
        "n_layer": net.n_layers,
        "n_head": net.n_heads,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[str(net.activation)],
        **_FIXED_CONFIG,
    }


def _names(n_layers: int) -> dict[str, tuple[str, ...]]:
    """Return Hugging Face's name of each parameter -> gptrain's names of its parts.

    A parameter with several parts, such as `c_attn`, is their concatenation along the outputs.

    Args:
        n_layers: Number of blocks.
    """
    names = {gpt2_name: (name,) for gpt2_name, name in _NAMES_OUTSIDE_BLOCKS.items()}
    return names | {
        f"h.{block}.{gpt2_layer}.{kind}": tuple(f"blocks.{block}.{name}.{kind}" for name in layers)
        for block in range(n_layers)
        for gpt2_layer, layers in _LAYERS_OF_BLOCK.items()
        for kind in ("weight", "bias")
    }

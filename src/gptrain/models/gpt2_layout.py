"""SimpleGPT's weights in the layout of Hugging Face's GPT-2, and back.

There q, k and v are one `c_attn`, and a projection's matrix is (inputs, outputs), the transpose of
nn.Linear's. All else differs by name only. Source: GPT2LMHeadModel of huggingface/transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# A block's own names -> theirs; the projections are the transposed ones.
_NORMS = {"norm_1": "ln_1", "norm_2": "ln_2"}
_PROJECTIONS = {"attention.out_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc"}
_PROJECTIONS |= {"mlp.down_proj": "mlp.c_proj"}
_FUSED = [f"attention.{name}_proj" for name in "qkv"]  # in the order in which c_attn holds them
_OUTSIDE = {"token_embedding": "wte", "position_embedding": "wpe", "norm": "ln_f"}
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # buffers that old files hold; not learned
# What SimpleGPT always does, and theirs may be told not to: key -> value, theirs by default.
_FIXED = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def to_gpt2(net: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the GPT2LMHeadModel that computes what net computes.

    The tensors are views where the layout allows; the head is tied and therefore left out.
    """
    config = {
        **_FIXED,
        "architectures": ["GPT2LMHeadModel"],
        **{theirs: value for theirs, (_, value) in _sizes(net).items()},
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[net.activation],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), net.dropout.p),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # theirs are those of one tokenizer
    }
    state, tensors = net.state_dict(), {}
    for ours, theirs in _plain_names(net.n_layers):
        tensors[theirs] = state[ours].t() if _is_matrix(ours) else state[ours]
    for block, kind in _fused_names(net.n_layers):
        parts = [state[f"blocks.{block}.{name}.{kind}"] for name in _FUSED]
        tensors[f"h.{block}.attn.c_attn.{kind}"] = torch.cat(parts).t()  # a bias stays as it is
    return config, {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def from_gpt2(
    net: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Their tensors under net's names and in its layout, as views; nothing is copied.

    Args:
        config: of config.json; number of heads and activation stand nowhere else.

    Raises: ValueError, one line that names both sides of all that does not fit.
    """
    _check(net, config)
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    theirs = {name: tensor for name, tensor in theirs.items() if not _MASK.fullmatch(name)}
    head = theirs.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, theirs["wte.weight"]):
        raise ValueError("lm_head.weight differs from wte.weight there; here the head is tied")
    state = {}
    for ours, name in _plain_names(net.n_layers):
        tensor = _take(theirs, name)
        state[ours] = tensor.t() if _is_matrix(ours) else tensor
    for block, kind in _fused_names(net.n_layers):
        fused = _take(theirs, f"h.{block}.attn.c_attn.{kind}").t()  # (3 D, D), or (3 D,)
        for name, part in zip(_FUSED, fused.chunk(3), strict=True):
            state[f"blocks.{block}.{name}.{kind}"] = part
    if theirs:
        raise ValueError(f"{', '.join(theirs)}: there, and nothing like it here")
    return state | {"head.weight": state["token_embedding.weight"]}


def _check(net: nn.Module, config: Mapping[str, Any]) -> None:
    wrong = [
        f"{key}={config[key]} there, always {value} here"
        for key, value in _FIXED.items()
        if config.get(key, value) not in (value, 4 * net.d_model if key == "n_inner" else value)
    ]
    wrong += [
        f"{theirs}={config.get(theirs)} there, {ours}={value} here"
        for theirs, (ours, value) in _sizes(net).items()
        if config.get(theirs) != value
    ]
    activation = config.get("activation_function", "gelu_new")
    if _ACTIVATIONS.get(activation) != net.activation:
        wrong.append(f"activation_function={activation} there, activation={net.activation} here")
    if wrong:
        raise ValueError("; ".join(wrong))


def _sizes(net: nn.Module) -> dict[str, tuple[str, int]]:
    names = {"vocab_size": "vocab_size", "n_positions": "max_seq_len", "n_embd": "d_model"}
    names |= {"n_layer": "n_layers", "n_head": "n_heads"}
    return {theirs: (ours, getattr(net, ours)) for theirs, ours in names.items()}


def _plain_names(n_layers: int) -> list[tuple[str, str]]:
    pairs = [(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in _OUTSIDE.items()]
    pairs.append(("norm.bias", "ln_f.bias"))
    inside = (_NORMS | _PROJECTIONS).items()
    return pairs + [
        (f"blocks.{block}.{ours}.{kind}", f"h.{block}.{theirs}.{kind}")
        for block in range(n_layers)
        for ours, theirs in inside
        for kind in ("weight", "bias")
    ]


def _fused_names(n_layers: int) -> list[tuple[int, str]]:
    return [(block, kind) for block in range(n_layers) for kind in ("weight", "bias")]


def _is_matrix(name: str) -> bool:
    return any(name.endswith(f"{projection}.weight") for projection in _PROJECTIONS)


def _take(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"{name}: here, and missing there")
    return tensors.pop(name)

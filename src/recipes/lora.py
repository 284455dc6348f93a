"""Train low-rank adapters of a net, whose own weights stay frozen.

Config: conf/experiment/lora.yaml. A linear layer y = W x becomes y = W x + (alpha / rank) B A x,
with A (rank, in) and B (out, rank). B starts at 0. Source: Hu et al. 2021, "LoRA",
arXiv:2106.09685.
"""

import math
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.models import HuggingFace, Llama, SimpleGPT

# Nets that get adapters. Add your own.
NETS: dict[str, Callable[..., nn.Module]] = {
    "Llama": Llama,
    "SimpleGPT": SimpleGPT,
    "HuggingFace": HuggingFace,
}


class LoRALinear(nn.Linear):
    """A linear layer with frozen weights and an adapter.

    Args:
        layer: Layer whose weights are taken over.
        rank: Rank of the adapter.
        alpha: Numerator of the adapter's factor, which is alpha / rank.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer and its adapter, (..., in) -> (..., out)."""
        change = F.linear(F.linear(input, self.lora_a), self.lora_b)
        return super().forward(input) + self.scale * change

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return a plain nn.Linear whose weight is the sum of the frozen weight and the adapter."""
        has_bias = self.bias is not None
        layer = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        layer.bias = self.bias
        layer.weight = nn.Parameter(self.weight + self.scale * self.lora_b @ self.lora_a)
        return layer


def with_adapters(
    base: str, rank: int, alpha: float, targets: list[str], **arguments: Any
) -> nn.Module:
    """Build a net, freeze it, and give an adapter to each linear layer that `targets` names.

    Args:
        base: Name of the net's class in NETS.
        rank: Rank of the adapters.
        alpha: Numerator of the adapters' factor, which is alpha / rank.
        targets: Patterns of names of layers, such as `*.q_proj`.
        arguments: Arguments of the net.

    Raises:
        ValueError: If there is no such net, or no linear layer with such a name.
    """
    if base not in NETS:
        raise ValueError(f"base={base}: unknown; allowed: {', '.join(NETS)}, or add it to NETS")
    net: Any = NETS[base](**arguments).requires_grad_(False)
    linear = {name: part for name, part in net.named_modules() if type(part) is nn.Linear}
    chosen = [name for name in linear if any(fnmatch(name, target) for target in targets)]
    if not chosen:
        names = sorted({f"*.{name.rpartition('.')[2]}" for name in linear})
        raise ValueError(f"targets={targets}: no linear layer; allowed: {', '.join(names)}")
    for name in chosen:
        net.set_submodule(name, LoRALinear(linear[name], rank, alpha))
    if hasattr(net, "init_parameter"):
        net.init_parameter = partial(init_parameter, net.init_parameter)
    if hasattr(net, "to_hugging_face"):
        net.to_hugging_face = partial(to_hugging_face, net, net.to_hugging_face)
        net.to_peft = partial(to_peft, net, rank, alpha)
    return net


def init_parameter(init_base: Callable[[str, Tensor], None], name: str, tensor: Tensor) -> None:
    """Fill one parameter in place with its initial values: 0 in each B, otherwise those of the net.

    Args:
        init_base: Method `init_parameter` of the net without adapters.
        name: Name of the parameter in the net.
        tensor: Full (unsharded) tensor to fill.
    """
    if name.endswith(".lora_b"):
        tensor.zero_()
    else:
        init_base(name, tensor)


def adapters(net: nn.Module) -> dict[str, LoRALinear]:
    """Return name -> layer for all layers of a net that have an adapter."""
    return {name: part for name, part in net.named_modules() if isinstance(part, LoRALinear)}


def merge(net: Any) -> None:
    """Add each adapter to the weights of its layer, in place; the net then has no adapters."""
    for name, layer in adapters(net).items():
        net.set_submodule(name, layer.merged())


def to_hugging_face(net: nn.Module, convert: Callable[[], tuple]) -> tuple[dict, dict]:
    """Merge the adapters in place and return the config and the tensors for transformers.

    Args:
        net: Net with adapters.
        convert: Method `to_hugging_face` of the net without adapters.
    """
    merge(net)
    return convert()


def to_peft(net: Any, rank: int, alpha: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of the adapters for a folder of the package peft.

    The folder belongs to the model that transformers loads from the exported net without adapters.
    The adapters are merged into `net`, in place.

    Args:
        net: Net with adapters.
        rank: Rank of the adapters.
        alpha: Numerator of the adapters' factor, which is alpha / rank.

    Raises:
        ValueError: If transformers has no layer with the weights of a layer with an adapter.
    """
    layers = adapters(net)
    merge(net)
    _, tensors = net.to_hugging_face()
    names = {tensor.data_ptr(): name.removesuffix(".weight") for name, tensor in tensors.items()}
    saved, modules = {}, set()
    for name, layer in layers.items():
        hf_name = names.get(net.get_submodule(name).weight.data_ptr())
        if hf_name is None:
            raise ValueError(f"{name}: transformers stores it with other layers; try: format=hf")
        modules.add(hf_name)
        saved[f"base_model.model.{hf_name}.lora_A.weight"] = layer.lora_a
        saved[f"base_model.model.{hf_name}.lora_B.weight"] = layer.lora_b
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha}
    return config | {"target_modules": sorted(modules), "bias": "none"}, saved

"""Any causal language model of transformers as a net. Needs the extra `export`.

Only a config is read, by its keys or from a local folder: no code but transformers' own is run, and
nothing is fetched. The weights of a folder: init_from=<folder>, as for every net.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Keys of a config that name code to be fetched, and the type of the weights, which is the run's.
_LEFT_OUT = {"auto_map", "quantization_config", "dtype", "torch_dtype"}


class HuggingFace(nn.Module):
    """A model of transformers, and what of the contract of gptrain.models it offers.

    Args:
        config: keys of its config, `model_type` among them; they win over the folder's.
        path: a folder with a config.json.

    Attributes:
        blocks: its longest list of layers of one class.
        head, hidden: where the logits are the head of the hidden states and nothing more.

    Raises: ValueError where transformers is missing or knows no such model, or sizes contradict.
    """

    def __init__(
        self, vocab_size: int, config: Mapping[str, Any] | None = None, path: str | None = None
    ):
        super().__init__()
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
            from transformers.models.auto import modeling_auto as known
        except ImportError as error:
            raise ValueError(f'{error}; try: pip install -e ".[export]"') from error
        file = Path(path or "").expanduser() / "config.json"
        if path is not None and not file.is_file():
            raise ValueError(f"path={path}: no config.json there, which makes a folder a model")
        keys = (json.loads(file.read_text()) if path is not None else {}) | (config or {})
        keys = {"vocab_size": vocab_size} | _without_code(keys)
        if keys.get("model_type") not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            kind = keys.get("model_type")
            raise ValueError(f"model_type={kind}: no causal language model of this transformers")
        if keys["vocab_size"] != vocab_size:
            raise ValueError(f"vocab_size={vocab_size}: config or path says {keys['vocab_size']}")
        made = AutoConfig.for_model(**keys)
        self.model = AutoModelForCausalLM.from_config(made, trust_remote_code=False)
        self.vocab_size, self.d_model = vocab_size, made.hidden_size
        self.n_layers = made.num_hidden_layers
        lists = [part for part in self.model.modules() if isinstance(part, nn.ModuleList)]
        lists = [part for part in lists if len({type(block) for block in part}) == 1]
        head, own = self.model.get_output_embeddings(), self.__dict__
        # Second names, not registered: what is saved has the names that it has in the model.
        own |= {"blocks": max(lists, key=len)} if lists else {}
        if isinstance(head, nn.Linear) and self._is_last(head):
            own |= {"head": head, "hidden": self._hidden}

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of the token that follows each of tokens (B, T)."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def _hidden(self, tokens: Tensor) -> Tensor:
        return self.model.base_model(input_ids=tokens, use_cache=False)[0]  # (B, T, D)

    @torch.no_grad()
    def _is_last(self, head: nn.Linear) -> bool:
        # Looked at, since it is written nowhere: some scale their logits, or bound them.
        tokens = torch.arange(min(9, self.vocab_size))[None]  # one of them may be padding
        self.eval()
        is_last = torch.equal(self(tokens), head(self._hidden(tokens)))
        self.train()
        return is_last

    def to_hugging_face(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Its config, and its tensors under the first of their names."""
        config = self.model.config.to_dict() | {"architectures": [type(self.model).__name__]}
        state = self.model.state_dict(keep_vars=True)
        first = {tensor: name for name, tensor in reversed(state.items())}
        return config, {name: tensor for tensor, name in first.items()}

    def from_hugging_face(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """A state dict from those of a model of the same type.   Raises: ValueError for another."""
        ours, theirs = self.model.config.model_type, config.get("model_type")
        if ours != theirs:
            raise ValueError(f"model_type={theirs} there, {ours} here")
        state = self.model.state_dict(keep_vars=True)
        found = {tensor: tensors[name] for name, tensor in state.items() if name in tensors}
        tied = {name: found[tensor] for name, tensor in state.items() if tensor in found}
        return {f"model.{name}": tensor for name, tensor in {**tensors, **tied}.items()}


def _without_code(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_code(value) if isinstance(value, Mapping) else value
        for key, value in keys.items()
        if key not in _LEFT_OUT and "implementation" not in key  # of attention: may be fetched
    }

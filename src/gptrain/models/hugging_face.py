"""Any causal language model of transformers as a net. Needs the extra `export`.

Only a config is read, by its keys or from a local folder: no code but transformers' own is run, and
nothing is fetched. The weights of a folder: init_from=<folder>, as for every net.
"""

from __future__ import annotations

import json
import re
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

    Raises: ValueError where transformers knows no such model, or sizes contradict.
    """

    def __init__(
        self, vocab_size: int, config: Mapping[str, Any] | None = None, path: str | None = None
    ):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto import modeling_auto as known

        keys: dict[str, Any] = {"vocab_size": vocab_size, **config_keys(config, path)}
        kind = str(keys.get("model_type"))
        if kind not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"model_type={kind}: no causal language model of this transformers")
        if keys["vocab_size"] != vocab_size:
            raise ValueError(f"vocab_size={vocab_size}: config or path says {keys['vocab_size']}")
        try:
            made = AutoConfig.for_model(**keys)
            self.model = AutoModelForCausalLM.from_config(made, trust_remote_code=False)
            head = self.model.get_output_embeddings()
            has_head = isinstance(head, nn.Linear) and self._is_last(head)
        except Exception as error:  # a contradiction is answered by any type
            is_meta = torch.get_default_device().type == "meta"
            if is_meta and isinstance(error, (RuntimeError, TypeError)):
                raise  # it may need real numbers
            said = " ".join(str(error).split())
            raise ValueError(f"transformers cannot make this {kind}: {said}") from error
        sizes = made.get_text_config()
        self.vocab_size = vocab_size
        self.d_model, self.n_layers = sizes.hidden_size, sizes.num_hidden_layers
        lists = [part for part in self.model.modules() if isinstance(part, nn.ModuleList)]
        lists = [part for part in lists if len({type(block) for block in part}) == 1]
        # Second names, not registered: what is saved has the names that it has in the model.
        if lists:
            self.__dict__["blocks"] = max(lists, key=len)
        if has_head:
            self.__dict__.update(head=head, hidden=self._hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of the token that follows each of tokens (B, T)."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def _hidden(self, tokens: Tensor) -> Tensor:
        return self.model.get_decoder()(input_ids=tokens, use_cache=False)[0]  # (B, T, D)

    @torch.no_grad()
    def _is_last(self, head: nn.Linear) -> bool:
        """Whether the head makes the logits of the hidden states, and nothing comes between.

        Looked at, since it is written nowhere: some scale their logits, or bound them. Told by
        which tensors pass, not by their numbers, so that a net on the meta device can be asked.
        """
        base, inputs, outputs = self.model.get_decoder(), {}, {}

        def note(part: nn.Module, given: Any, made: Any) -> None:
            inputs[part], outputs[part] = given, made

        hooks = [part.register_forward_hook(note) for part in (base, head)]
        self.eval()
        # With a cache: without one transformers looks whether positions begin anew.
        logits = self.model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).logits
        self.train()
        for hook in hooks:
            hook.remove()
        if base not in outputs or outputs.get(head) is not logits:
            return False
        given, hidden = inputs[head][0].untyped_storage(), outputs[base][0].untyped_storage()
        return given._cdata == hidden._cdata  # one memory, also where a view of it is given

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
        state, prefix = self.model.state_dict(keep_vars=True), f"{self.model.base_model_prefix}."
        ignored = self.model._keys_to_ignore_on_load_unexpected or ()
        given = {}  # GPT-2's own file was saved without its head, and with masks
        for name, tensor in tensors.items():
            full = prefix + name if prefix + name in state else name
            if full in state or not any(re.search(old, name) for old in ignored):
                given[full] = tensor
        found = {tensor: given[name] for name, tensor in state.items() if name in given}
        tied = {name: found[tensor] for name, tensor in state.items() if tensor in found}
        return {f"model.{name}": tensor for name, tensor in {**given, **tied}.items()}


def config_keys(config: Mapping[str, Any] | None, path: str | None) -> dict[str, Any]:
    """Keys of a folder's config and those given, which win; of code none.   Raises: ValueError."""
    content = {}
    if path is not None:
        file = Path(path).expanduser() / "config.json"
        if not file.is_file():
            raise ValueError(f"path={path}: no config.json there, which makes a folder a model")
        try:
            content = dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}: no JSON of keys ({error})") from error
    return _without_code({**content, **(config or {})})


def _without_code(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_code(value) if isinstance(value, Mapping) else value
        for key, value in keys.items()
        if key not in _LEFT_OUT and "implementation" not in key  # of attention: may be fetched
    }

"""Causal language models of Hugging Face transformers as nets. Needs the extra `export`.

Only a config is read, from keys or from a local folder. No code except that of the installed
transformers runs, and nothing is downloaded. To start from the weights of a folder, set
`init_from=<folder>`, as for every net.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

# Keys that name code to download, and the dtype of the weights, which trainer.precision determines.
_IGNORED_KEYS = {"auto_map", "quantization_config", "dtype", "torch_dtype"}


class HuggingFace(nn.Module):
    """A causal language model of transformers as a net that gptrain trains.

    It has the optional attributes of `gptrain.models` that the model allows. The weights are newly
    initialized.

    Args:
        vocab_size: Number of token ids. It overrides that of the config.
        config: Keys of the model's config, with `model_type`. They override those of `path`.
        path: Folder with a config.json.

    Attributes:
        model: Model of transformers.
        vocab_size: Number of token ids.
        blocks: Longest nn.ModuleList of the model whose layers have one class. Missing if there is
            no such list.
        max_seq_len: Number of learned positions. Missing, or None, if the model has no such table:
            it then computes any number of positions.
        head: Output embedding of the model. Missing if it is no linear layer. Some models scale or
            bound the logits of `head(hidden(tokens))`, which no key of the config shows: a run
            compares the logits with those of `forward` before the first step.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
        OSError: If `path` has no config.json.
        ValueError: If the config.json is not JSON, or if transformers does not know the
            `model_type` or cannot build the model.
    """

    def __init__(
        self, vocab_size: int, config: Mapping[str, Any] | None = None, path: str | None = None
    ):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        content = json.loads((Path(path).expanduser() / "config.json").read_text()) if path else {}
        keys = _without_code({"model_type": "", **content, **(config or {})})
        keys["vocab_size"] = vocab_size
        try:
            model_config = AutoConfig.for_model(**keys)
            self.model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
        except Exception as error:  # transformers raises any type for contradicting keys
            reason = " ".join(str(error).split())[:174]  # some errors list all types
            raise ValueError(f"transformers cannot build {keys['model_type']}: {reason}") from error
        self.vocab_size = vocab_size
        tables = [part for part in self.model.modules() if isinstance(part, nn.Embedding)]
        if len(tables) > 1:  # the second table has the learned positions
            text_config = model_config.get_text_config()
            self.max_seq_len = getattr(text_config, "max_position_embeddings", None)
        lists = [part for part in self.model.modules() if isinstance(part, nn.ModuleList)]
        lists = [part for part in lists if len({type(block) for block in part}) == 1]
        # `blocks` and `head` are aliases. As submodules they would add names to the state dict.
        if lists:
            self.__dict__["blocks"] = max(lists, key=len)
        if isinstance(head := self.model.get_output_embeddings(), nn.Linear):
            self.__dict__["head"] = head

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits (B, T, V) of the token that follows each of the tokens (B, T)."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """Compute the hidden states (B, T, D) of tokens (B, T), after the decoder's final norm."""
        return self.model.get_decoder()(input_ids=tokens, use_cache=False)[0]  # (B, T, D)

    def to_hugging_face(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the model's config and its tensors by the names of transformers.

        The tensors are those of the model, not copies.
        """
        config = self.model.config.to_dict() | {"architectures": [type(self.model).__name__]}
        return config, self.model.state_dict()

    def from_hugging_face(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return a state dict for this net from the tensors of a model of the same type.

        The state dict holds the given tensors, not copies. It also has tensors with unknown names,
        except those that transformers ignores, and lacks missing tensors, so that the caller can
        report both. A tied tensor has the names that it has in `tensors`. The net is not changed.

        Args:
            config: Content of the folder's config.json. Only `model_type` is compared.
            tensors: Tensors by name. The prefix of the base model may be missing.

        Raises:
            ValueError: If the folder holds a model of another type.
        """
        expected = self.model.config.model_type
        model_type = config.get("model_type")
        if model_type != expected:
            raise ValueError(f"model_type={model_type} in the config, {expected} in the net")
        own_names = self.model.state_dict().keys()
        prefix = f"{self.model.base_model_prefix}."
        ignored_patterns = self.model._keys_to_ignore_on_load_unexpected or ()
        # GPT-2's original file has no head and no prefix, and contains attention masks.
        loaded = {}
        for name, tensor in tensors.items():
            full_name = prefix + name if prefix + name in own_names else name
            is_ignored = any(re.search(pattern, name) for pattern in ignored_patterns)
            if full_name in own_names or not is_ignored:
                loaded[f"model.{full_name}"] = tensor
        return loaded


def _without_code(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested keys of a config.json without those that could load code or set the dtype."""
    return {
        key: _without_code(value) if isinstance(value, Mapping) else value
        for key, value in keys.items()
        # A key such as attn_implementation may name a kernel, which transformers would download.
        if key not in _IGNORED_KEYS and "implementation" not in key
    }

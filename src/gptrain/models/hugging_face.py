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

import torch
from torch import Tensor, nn

# Keys that name code to download, and the dtype of the weights, which trainer.precision determines.
_IGNORED_KEYS = {"auto_map", "quantization_config", "dtype", "torch_dtype"}


class HuggingFace(nn.Module):
    """A causal language model of transformers as a net that gptrain trains.

    It has the optional attributes of `gptrain.models` that the model allows. The weights are newly
    initialized. To find out whether it can have `head`, the constructor runs the model once on one
    token.

    Args:
        vocab_size: Number of token ids, which must be that of the config if the config has it.
        config: Keys of the model's config, with `model_type`. They override those of `path`.
        path: Folder with a config.json.

    Attributes:
        blocks: Longest nn.ModuleList of the model whose layers have one class. Missing if there is
            no such list.
        max_seq_len: Number of learned positions. Missing if the model has no such table: it then
            computes any number of positions.
        head: Output embedding of the model. Missing if the logits are not `head(hidden(tokens))`.
        hidden: Function that computes the input of the head. Missing if `head` is missing.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
        ValueError: If `path` has no usable config.json, if transformers does not know the
            `model_type` or cannot build the model, or if `vocab_size` differs from the config. On
            the meta device a RuntimeError or TypeError of the model is passed on.
    """

    def __init__(
        self, vocab_size: int, config: Mapping[str, Any] | None = None, path: str | None = None
    ):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto import modeling_auto

        keys: dict[str, Any] = {"vocab_size": vocab_size, **config_keys(config, path)}
        model_type = str(keys.get("model_type"))
        if model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            message = "no causal language model of the installed transformers has this type"
            raise ValueError(f"model_type={model_type}: {message}")
        if keys["vocab_size"] != vocab_size:
            message = f"differs from vocab_size={keys['vocab_size']} of config or path"
            raise ValueError(f"vocab_size={vocab_size}: {message}")
        try:
            model_config = AutoConfig.for_model(**keys)
            self.model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
            head = self.model.get_output_embeddings()
            has_head = isinstance(head, nn.Linear) and self._computes_logits(head)
        except Exception as error:  # transformers raises any type for contradicting keys
            is_meta = torch.get_default_device().type == "meta"
            if is_meta and isinstance(error, (RuntimeError, TypeError)):
                raise  # the constructor may read values, which tensors on the meta device lack
            reason = " ".join(str(error).split())
            raise ValueError(f"transformers cannot build this {model_type}: {reason}") from error
        text_config = model_config.get_text_config()
        self.vocab_size = vocab_size
        self.d_model = text_config.hidden_size
        self.n_layers = text_config.num_hidden_layers
        tables = [part for part in self.model.modules() if isinstance(part, nn.Embedding)]
        if len(tables) > 1:  # the second table has the learned positions
            self.max_seq_len = getattr(text_config, "max_position_embeddings", None)
        lists = [part for part in self.model.modules() if isinstance(part, nn.ModuleList)]
        lists = [part for part in lists if len({type(block) for block in part}) == 1]
        # `blocks` and `head` are aliases. As submodules they would add names to the state dict.
        if lists:
            self.__dict__["blocks"] = max(lists, key=len)
        if has_head:
            self.__dict__.update(head=head, hidden=self._hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits (B, T, V) of the token that follows each of the tokens (B, T)."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Return the hidden states (B, T, D) of the decoder, after its final norm."""
        return self.model.get_decoder()(input_ids=tokens, use_cache=False)[0]  # (B, T, D)

    @torch.no_grad()
    def _computes_logits(self, head: nn.Linear) -> bool:
        """Return whether the model's logits equal `head(hidden states of the decoder)`.

        Some models scale or bound their logits, and no config key shows that. The check runs the
        model on one token and compares the identity of tensors and of their storage, not values,
        so that it works on the meta device. The model is in training mode afterwards. An exception
        of the model is passed on.

        Args:
            head: Output embedding of the model.
        """
        decoder = self.model.get_decoder()
        inputs: dict[nn.Module, Any] = {}
        outputs: dict[nn.Module, Any] = {}

        def record(module: nn.Module, module_inputs: Any, module_output: Any) -> None:
            inputs[module] = module_inputs
            outputs[module] = module_output

        hooks = [module.register_forward_hook(record) for module in (decoder, head)]
        self.eval()
        # Without a cache, transformers searches the position ids for packed sequences. The search
        # reads values, which tensors on the meta device lack.
        logits = self.model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).logits
        self.train()
        for hook in hooks:
            hook.remove()
        if decoder not in outputs or outputs.get(head) is not logits:
            return False
        head_input = inputs[head][0].untyped_storage()
        hidden = outputs[decoder][0].untyped_storage()
        # A view of the hidden states shares their storage.
        return head_input._cdata == hidden._cdata

    def to_hugging_face(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the model's config and its tensors; a tied tensor has the first of its names.

        The tensors are those of the model, not copies. The id of a special token that is outside
        the vocabulary becomes None: it is a default of transformers for its own tokenizer, such as
        50256 for GPT-2.
        """
        config = self.model.config.to_dict() | {"architectures": [type(self.model).__name__]}
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(config.get(key), int) and config[key] >= self.vocab_size:
                config[key] = None
        state = self.model.state_dict(keep_vars=True)
        first_names = {tensor: name for name, tensor in reversed(state.items())}
        return config, {name: tensor for tensor, name in first_names.items()}

    def from_hugging_face(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return a state dict for this net from the tensors of a model of the same type.

        The state dict holds the given tensors, not copies. A tensor with an unknown name is in it,
        too, unless transformers ignores that name, and a missing tensor is missing, so that the
        caller can report both.

        Args:
            config: Content of the folder's config.json. Only `model_type` is compared.
            tensors: Tensors by name. The prefix of the base model may be missing, and a tied tensor
                may be missing under all but one of its names.

        Raises:
            ValueError: If the folder holds a model of another type.
        """
        expected = self.model.config.model_type
        model_type = config.get("model_type")
        if model_type != expected:
            raise ValueError(f"model_type={model_type} in the config, {expected} in the net")
        state = self.model.state_dict(keep_vars=True)
        prefix = f"{self.model.base_model_prefix}."
        ignored_patterns = self.model._keys_to_ignore_on_load_unexpected or ()
        # GPT-2's original file has no head and no prefix, and contains attention masks.
        loaded = {}
        for name, tensor in tensors.items():
            full_name = prefix + name if prefix + name in state else name
            is_ignored = any(re.search(pattern, name) for pattern in ignored_patterns)
            if full_name in state or not is_ignored:
                loaded[full_name] = tensor
        loaded_of = {tensor: loaded[name] for name, tensor in state.items() if name in loaded}
        tied = {name: loaded_of[tensor] for name, tensor in state.items() if tensor in loaded_of}
        return {f"model.{name}": tensor for name, tensor in {**loaded, **tied}.items()}


def config_keys(config: Mapping[str, Any] | None, path: str | None) -> dict[str, Any]:
    """Return the keys of a model's config, without those that name code or the dtype.

    Args:
        config: Keys that override those of `path`.
        path: Folder with a config.json.

    Raises:
        ValueError: If `path` has no config.json, or the file is not a JSON object.
    """
    content = {}
    if path is not None:
        file = Path(path).expanduser() / "config.json"
        if not file.is_file():
            raise ValueError(f"path={path}: no config.json in this folder")
        try:
            content = dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}: not a JSON object ({error})") from error
    return _without_code({**content, **(config or {})})


def _without_code(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested keys of a config.json without those that could load code or set the dtype."""
    return {
        key: _without_code(value) if isinstance(value, Mapping) else value
        for key, value in keys.items()
        # A key such as attn_implementation may name a kernel, which transformers would download.
        if key not in _IGNORED_KEYS and "implementation" not in key
    }

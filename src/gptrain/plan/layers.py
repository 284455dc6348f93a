"""Nets of fewer layers than a config has, and what follows from them for the one that it has."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gptrain.config.compose import plain
from gptrain.models.hugging_face import config_keys

LAYERS = ("n_layers", "num_hidden_layers", "num_layers", "n_layer")  # our key, transformers'


def find_layers(cfg: DictConfig) -> tuple[str, int] | None:
    """Key and number of the net's layers, where its config names them.   Raises: ValueError."""
    model = plain(cfg)["model"]
    for group, keys in (("model", model), ("model.config", hugging_face_config(model))):
        for name in LAYERS:
            if isinstance(keys.get(name), int):
                return f"{group}.{name}", keys[name]
    return None


def hugging_face_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the config of a net of transformers; of another net none.   Raises: ValueError."""
    is_theirs = model["_target_"] == "gptrain.models.HuggingFace"
    return config_keys(model.get("config"), model.get("path")) if is_theirs else {}


def cut(cfg: DictConfig, key: str, count: int, n_layers: int) -> DictConfig:
    """The config of a net of n_layers, and of what lists say of each of `count` layers."""
    cfg = deepcopy(cfg)
    changes = {key: n_layers} | {
        f"model.config.{name}": value[:n_layers]
        for name, value in hugging_face_config(plain(cfg)["model"]).items()
        if isinstance(value, list) and len(value) == count
    }
    for name, value in changes.items():
        OmegaConf.update(cfg, name, value, force_add=True)
    return cfg


def along_a_line(few: Any, more: Any, times: float) -> Any:
    """`more`, and the difference of its numbers to those of `few` so many times besides."""
    if isinstance(more, dict):
        return {key: along_a_line(few.get(key, 0), more[key], times) for key in more}
    return more if isinstance(more, str) else round(more + times * (more - few))

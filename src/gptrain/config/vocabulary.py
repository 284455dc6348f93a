"""Implements `model.vocab_size=auto`: the size of the tokenizer's or the net's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gptrain.config.values import walk
from gptrain.core.errors import INPUT_NOT_FOUND, ConfigError
from gptrain.core.small_files import read_facts

AUTO = "auto"
KEY = "model.vocab_size"


def with_vocab_size(cfg: DictConfig) -> DictConfig:
    """Return the config with a number in place of `model.vocab_size=auto`.

    The size is that of the model in `model.path` or else of the largest tokenizer in the data
    group, rounded up to a multiple of `model.vocab_multiple`. A config with another value is
    returned unchanged.

    Args:
        cfg: Composed config, which is not changed.

    Raises:
        ConfigError: If no file gives the size.
    """
    if OmegaConf.select(cfg, KEY, throw_on_resolution_failure=False) != AUTO:
        return cfg
    sizes = list(_find_sizes(cfg))
    if not sizes:
        message = "neither data.tokenizer nor model.path has a vocabulary"
        raise ConfigError.of(KEY, AUTO, message, hint=f"{KEY}=50304")
    multiple = OmegaConf.select(cfg, "model.vocab_multiple") or 1
    cfg = cfg.copy()
    cfg.model.vocab_size = -(-max(sizes) // multiple) * multiple
    return cfg


def _find_sizes(cfg: DictConfig) -> Iterator[int]:
    """Yield the vocabulary size of the model in `model.path`, or of each tokenizer of the data.

    The tokenizers of the data group count only if `model.path` is not given.

    Raises:
        ConfigError: If the model's or a tokenizer's file does not give its size.
    """
    path = OmegaConf.select(cfg, "model.path", throw_on_resolution_failure=False)
    if isinstance(path, str):
        facts = read_facts(Path(path).expanduser() / "config.json")
        text_config = facts.get("text_config")  # of a model that also reads images
        size = (text_config if isinstance(text_config, dict) else facts).get("vocab_size")
        if not isinstance(size, int):
            message = f"no config.json with a vocab_size, which {KEY}={AUTO} needs"
            raise ConfigError.of("model.path", path, message, code=INPUT_NOT_FOUND)
        yield size
        return
    data = OmegaConf.to_container(cfg.data) if "data" in cfg else {}
    for place, _ in walk(data, "data"):
        if place.endswith(".tokenizer") and ".train." not in place and ".val." not in place:
            tokenizer = OmegaConf.select(cfg, place, throw_on_missing=False)
            if tokenizer is not None:
                yield _count_tokens(place, str(tokenizer))


def _count_tokens(key: str, tokenizer: str) -> int:
    """Return the highest token id of a tokenizer plus 1.

    Args:
        key: Config key of the tokenizer, for the error.
        tokenizer: `bytes`, or the path of a tokenizer.json or its folder. `bpe` is an error,
            because its vocabulary is learned with the size that is asked for.

    Raises:
        ConfigError: If its vocabulary cannot be read.
    """
    if tokenizer == "bytes":
        return 256
    if tokenizer == "bpe":
        message = f"needs a number for {KEY}, the size of the vocabulary that it learns"
        raise ConfigError.of(key, tokenizer, message, hint=f"{KEY}=4096")
    path = Path(tokenizer).expanduser()
    facts = read_facts(path / "tokenizer.json" if path.is_dir() else path)
    if facts.get("type") == "bytes":
        return 256
    model: Any = facts.get("model")
    vocabulary = model.get("vocab", {}) if isinstance(model, dict) else {}
    is_list = isinstance(vocabulary, list)  # a Unigram model: pairs of text and probability
    ids = [*range(len(vocabulary))] if is_list else [*vocabulary.values()]
    ids += [token["id"] for token in facts.get("added_tokens", [])]
    if not ids:
        message = f"no tokenizer.json with a vocabulary, which {KEY}={AUTO} needs"
        raise ConfigError.of(key, tokenizer, message, code=INPUT_NOT_FOUND)
    return max(ids) + 1

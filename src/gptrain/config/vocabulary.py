"""Implements `model.vocab_size=auto`: the size of the tokenizer's or the net's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gptrain.core.errors import INPUT_NOT_FOUND, ConfigError
from gptrain.core.locations import expand_home
from gptrain.core.small_files import flatten, read_facts

AUTO = "auto"
KEY = "model.vocab_size"


def vocabulary_size(values: dict[str, Any]) -> int:
    """Return the number by which `model.vocab_size=auto` is replaced.

    The size is that of the model in `model.path` or else of the largest tokenizer in the data
    group, rounded up to a multiple of `model.vocab_multiple`.

    Args:
        values: Composed config as nested dicts, in which references are resolved.

    Raises:
        ConfigError: If no file gives the size, or if a file of the model or of a tokenizer cannot
            be used.
    """
    model = values["model"]
    sizes = list(_find_sizes(model.get("path"), values.get("data")))
    if not sizes:
        message = "neither data.tokenizer nor model.path has a vocabulary"
        raise ConfigError.of(KEY, AUTO, message, hint=f"{KEY}=50304")
    multiple = model.get("vocab_multiple") or 1
    return -(-max(sizes) // multiple) * multiple


def _find_sizes(path: Any, data: Any) -> Iterator[int]:
    """Yield the vocabulary size of a model's folder, or of each tokenizer of the data.

    Tokenizers inside a node `train` or `val` are left out, because the groups of gptrain repeat
    there the tokenizer of the group.

    Args:
        path: Value of `model.path`. If it is a string, the tokenizers do not count.
        data: Node `data` of the config.

    Raises:
        ConfigError: If the model's or a tokenizer's file does not give its size, or if a tokenizer
            is `bpe`, which has no size of its own.
    """
    if isinstance(path, str):
        facts = read_facts(expand_home(path) / "config.json")
        text_config = facts.get("text_config")  # models that also read images have it
        size = (text_config if isinstance(text_config, dict) else facts).get("vocab_size")
        if not isinstance(size, int):
            message = f"no config.json with a vocab_size, which {KEY}={AUTO} needs"
            raise ConfigError.of("model.path", path, message, code=INPUT_NOT_FOUND)
        yield size
        return
    for place, tokenizer in flatten(data, "data").items():
        is_of_part = ".train." in place or ".val." in place
        if place.endswith(".tokenizer") and tokenizer is not None and not is_of_part:
            yield _count_tokens(place, str(tokenizer))


def _count_tokens(key: str, tokenizer: str) -> int:
    """Return the highest token id of a tokenizer plus 1.

    Args:
        key: Config key of the tokenizer, for the error.
        tokenizer: `bytes`, or the path of a tokenizer.json or its folder. `bpe` is an error,
            because its vocabulary is learned with the size that is asked for.

    Raises:
        ConfigError: If the tokenizer is `bpe`, or if its file is missing or has no vocabulary.
    """
    if tokenizer == "bytes":
        return 256
    if tokenizer == "bpe":
        message = f"needs a number for {KEY}, the size of the vocabulary that it learns"
        raise ConfigError.of(key, tokenizer, message, hint=f"{KEY}=4096")
    path = expand_home(tokenizer)
    facts = read_facts(path / "tokenizer.json" if path.is_dir() else path)
    try:
        vocabulary: Any = facts["model"]["vocab"]
        # The vocabulary of a Unigram model is a list of pairs of text and probability.
        ids = [*range(len(vocabulary))] if isinstance(vocabulary, list) else [*vocabulary.values()]
        return max(ids + [token["id"] for token in facts.get("added_tokens", [])]) + 1
    except (AttributeError, KeyError, TypeError, ValueError):
        message = f"no tokenizer.json with a vocabulary, which {KEY}={AUTO} needs"
        raise ConfigError.of(key, tokenizer, message, code=INPUT_NOT_FOUND) from None

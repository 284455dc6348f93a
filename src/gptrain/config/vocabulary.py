"""Implements `model.vocab_size=auto`: the size of the tokenizer's or the net's vocabulary."""

from typing import Any

from gptrain.core.errors import BAD_DATA, INPUT_NOT_FOUND, ConfigError, DataError, first_line
from gptrain.core.locations import expand_home
from gptrain.core.small_files import flatten, read_facts

AUTO = "auto"
KEY = "model.vocab_size"


def vocabulary_size(values: dict[str, Any]) -> int:
    """Return what `model.vocab_size=auto` stands for, rounded up to `model.vocab_multiple`.

    It is that in the config.json of `model.path`, or that of the largest tokenizer in the data
    group.
    """
    model, size = values["model"], 0
    if path := model.get("path"):
        facts = read_facts(expand_home(path) / "config.json")
        # A model that also reads images has a config of its text.
        size = (facts.get("text_config") or facts).get("vocab_size")
        if not isinstance(size, int):
            message = "no config.json with a vocab_size"
            raise ConfigError.of("model.path", path, message, code=INPUT_NOT_FOUND)
    else:
        for key, name in flatten(values.get("data"), "data").items():
            is_of_part = ".train." in key or ".val." in key
            if key.endswith(".tokenizer") and name and not is_of_part:
                size = max(size, _count_tokens(key, name))
    if not size:
        message = "neither data.tokenizer nor model.path has a vocabulary"
        raise ConfigError.of(KEY, AUTO, message, hint=f"{KEY}=50304")
    multiple = model.get("vocab_multiple") or 1
    return -(-size // multiple) * multiple


def _count_tokens(key: str, name: str) -> int:
    """Return the highest token id of a tokenizer plus 1. Errors name the config key `key`."""
    from gptrain.data.tokenizers import load_tokenizer  # imports torch

    if name == "bpe":
        message = f"needs a number for {KEY}, the size of the vocabulary that it learns"
        raise ConfigError.of(key, name, message, hint=f"{KEY}=4096")
    try:
        return load_tokenizer(name).vocab_size
    except (FileNotFoundError, DataError) as error:
        code = INPUT_NOT_FOUND if isinstance(error, FileNotFoundError) else BAD_DATA
        raise ConfigError.of(key, name, first_line(error), code=code) from error

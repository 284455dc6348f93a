"""Composes a config with Hydra, on the conf/ of the project and of the library, and types it."""

import os
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from gptrain.config.resolvers import RESOLVERS
from gptrain.config.vocabulary import AUTO, vocabulary_size
from gptrain.core import locations
from gptrain.core.errors import ConfigError, ConfigIssue, first_line, show
from gptrain.core.schema import RunConfig
from gptrain.core.shell import option
from gptrain.core.small_files import flatten
from gptrain.runtime.process import run_stamp

# Exceptions that Hydra raises for an override or a yaml file. It does not wrap all of them.
REFUSALS = (
    HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, AttributeError,
    KeyError,
)  # fmt: skip
# Phrases of pydantic's messages, and what is printed instead.
PHRASES = {
    "greater than or equal to": ">=",
    "less than or equal to": "<=",
    "greater than": ">",
    "less than": "<",
    "Input should be": "must be",
    "Value error, ": "",
}
Config = TypeVar("Config", bound=RunConfig)


class LibraryChoices(SearchPathPlugin):
    """Hydra plugin that adds the library's conf/ behind the project's conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the library's conf/ to Hydra's search path. Hydra calls this method."""
        search_path.append(provider="gptrain", path="pkg://gptrain.conf")


@contextmanager
def open_hydra() -> Generator[Any, None, None]:
    """Initialize Hydra with gptrain's resolvers, and yield Hydra's main object.

    Hydra reads the conf/ of the project and, behind it, that of the library, or only the latter if
    there is no project. After the block Hydra's earlier state is restored.
    """
    # The config keeps the first value of run_stamp, so that a job of a sweep that runs in another
    # process has the same time in its folder name.
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
    for resolver in (locations.default_output_dir, locations.expand_home, *RESOLVERS):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
    Plugins.instance().register(LibraryChoices)
    conf = str(locations.find_conf() or locations.LIBRARY / "conf")
    if not os.path.isdir(conf):  # Hydra's first line would not name the folder
        raise ConfigError.of(locations.VARIABLE, conf, "no such folder")
    with initialize_config_dir(conf, job_name="train", version_base="1.3"):
        yield GlobalHydra.instance().hydra


def compose_words(words: list[str]) -> tuple[DictConfig, list[ConfigIssue]]:
    """Compose the config from all overrides that Hydra accepts.

    Args:
        words: Overrides of a command line.

    Returns:
        The config with Hydra's own node, and a problem for each override that was left out.

    Raises:
        ConfigError: If the reason of a refusal is not an override, for example a yaml file.
    """
    refusals: list[tuple[str, Exception]] = []
    with open_hydra():
        while True:
            try:
                cfg = compose("train", words, return_hydra_config=True)
                break
            except REFUSALS as error:
                key = _refused_key(error)
                refused = [word for word in words if key_of(word) == key]
                if not refused:
                    raise ConfigError.of("", None, first_line(error.__cause__ or error)) from error
                words = [word for word in words if word not in refused]
                refusals.append((refused[-1], error))
    known = flatten(OmegaConf.to_container(cfg, resolve=False))
    return cfg, [_explain(word, error, known) for word, error in refusals]


def key_of(word: str) -> str:
    """Return the key of an override, such as `a.b` for `+a.b=1`."""
    return word.partition("=")[0].lstrip("+~")


def _refused_key(error: Exception) -> str:
    """Return the key of the override that Hydra refused, or an empty string."""
    if isinstance(error, OverrideParseException):
        return key_of(error.override)
    if isinstance(error, MissingConfigException):
        return (error.missing_cfg_file or "").rpartition("/")[0]
    match = re.search(r"'([^'=]+)|Multiple values for ([^\s.]+)", str(error))
    return key_of(match[1] or match[2]) if match else ""


def _explain(word: str, error: Exception, known: Iterable[str]) -> ConfigIssue:
    """Return the problem of an override that Hydra refused.

    Args:
        word: The override.
        error: Exception that Hydra raised for it.
        known: Dotted keys of the config.
    """
    key, value, text = key_of(word), word.partition("=")[2] or None, str(error)
    if isinstance(error, OverrideParseException):
        if value is None:
            return ConfigIssue("", None, f"{word}: not key=value", hint="--help")
        return ConfigIssue(key, value, "cannot be parsed", hint=option(key, value))
    if isinstance(error, MissingConfigException):
        wanted = (error.missing_cfg_file or "").rpartition("/")[2]
        names = sorted(error.options or [])
        near = get_close_matches(wanted, names, 1)
        message = f"no choice {wanted}" + (f', did you mean "{near[0]}"?' if near else "")
        return ConfigIssue(key, value, message, ", ".join(names))
    if text.startswith("Ambiguous value"):
        hint = f"-m for a sweep, or {key}=[{value}] for a list"
        return ConfigIssue(key, value, "several values, but this is not a sweep", hint=hint)
    if text.startswith("Could not override"):
        return ConfigIssue(key, value, f"unknown key{_did_you_mean(key, known)}")
    return ConfigIssue(key, value, first_line(error))


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    """Return the end of a message with the known key that is most similar, or an empty string."""
    groups = {name.split(".")[0] for name in known}
    leaf = key.rpartition(".")[2]  # the group of the key may be missing or wrong
    same_leaf = sorted((name for name in known if name.endswith(f".{leaf}")), key=len)
    near = get_close_matches(key, {*known, *groups}, 1, cutoff=0.75) or same_leaf
    return f", did you mean {near[0]}? (new keys need +)" if near else ""


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a config as nested dicts with all references resolved, without Hydra's own node.

    `model.vocab_size=auto` is replaced by the number that the files of the tokenizers or the model
    give.

    Args:
        cfg: Composed config.

    Raises:
        ConfigError: If a required key is not set, a reference cannot be resolved, or no file gives
            the size of the vocabulary.
    """
    keys: list[Any] = [key for key in cfg if key != "hydra"]  # a key may be an integer
    cfg = OmegaConf.masked_copy(cfg, keys)
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or ""
        raise ConfigError.of(key, None, first_line(error)) from error
    model = values.get("model")
    if isinstance(model, dict) and model.get("vocab_size") == AUTO:
        cfg.model.vocab_size = vocabulary_size(values)  # other keys may refer to it
        return plain(cfg)
    return values


def typed(values: dict[str, Any], schema: type[Config]) -> Config:
    """Return the typed config.

    Args:
        values: Config as nested dicts, as `plain` returns it.
        schema: Type of the config.

    Raises:
        ConfigError: If values are invalid, or keys unknown or missing. It has all of them.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(list(_find_problems(error, values))) from None


def _find_problems(error: ValidationError, values: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Yield one problem for each key that pydantic refuses.

    Args:
        error: Error of the config.
        values: Config as nested dicts.
    """
    messages: dict[str, list[str]] = {}  # each member of a union has a message for its key
    given: dict[str, Any] = {}
    for details in error.errors(include_url=False):
        node: Any = values
        keys: list[str] = []
        is_missing = details["type"] == "missing"
        for part in details["loc"]:  # the names of the members of a union are no keys
            if isinstance(node, dict) and part in node:
                node = node[part]
                keys.append(str(part))
        if is_missing:
            keys.append(str(details["loc"][-1]))
        key = ".".join(keys)
        message = "missing, but required" if is_missing else details["msg"]
        if details["type"] == "extra_forbidden":
            message = f"unknown key{_did_you_mean(key, flatten(values).keys() - {key})}"
        for phrase, replacement in PHRASES.items():
            message = message.replace(phrase, replacement)
        messages.setdefault(key, []).append(message)
        given[key] = None if is_missing else show(node)
    for key, found in messages.items():
        yield ConfigIssue(key, given[key], " or ".join(dict.fromkeys(found)))

"""Composes a config with Hydra, on the conf/ of the project and of the library, and types it."""

import copy
import os
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from gptrain.core import errors, locations
from gptrain.core.errors import ConfigError, ConfigIssue, RunError, first_line, show
from gptrain.core.schema import RunConfig
from gptrain.core.shell import option
from gptrain.core.small_files import flatten, read_facts
from gptrain.runtime.process import run_stamp

SHORT_SEQ_LEN = 128  # default data.seq_len of a net that does not name its context length
# Largest default data.seq_len: longer contexts are an extension of a trained net.
LONG_SEQ_LEN = 8192
UNKNOWN = "unknown key"
AUTO, VOCAB = "auto", "model.vocab_size"


class LibraryChoices(SearchPathPlugin):
    """Hydra plugin that adds the library's conf/ behind the project's conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the library's conf/ to Hydra's search path. Hydra calls this method."""
        search_path.append(provider="gptrain", path="pkg://gptrain.conf")


def job_folder(number: int, varied: str) -> str:
    """Return the folder name of a sweep's job, such as `3-lr_0.001-seed_1`."""
    name = re.sub(r"[\w./@+]*?(\w+)=", r"\1_", varied)
    return re.sub(r"[^\w.+-]+", "-", f"{number}-{name}")[:80].strip("-.")


def plus(left: Any, right: int) -> Any:
    """Return left + right, or `left` if it is no integer, so that only its key is wrong."""
    return left + right if isinstance(left, int) else left


def default_seq_len(model: Any, shortest: int = 1) -> int:
    """Return the net's context length, at most LONG_SEQ_LEN, or SHORT_SEQ_LEN if not known."""
    length = model.get("max_seq_len") if isinstance(model, DictConfig) else None
    is_used = type(length) is int and length >= shortest
    return min(length, LONG_SEQ_LEN) if is_used else SHORT_SEQ_LEN


def of_parts(parts: Any, key: str, seq_len: int | None = None) -> Any:
    """Return part -> value of a key, or 1, in a mixture whose parts get `seq_len` if given."""
    parts = copy.deepcopy(parts)
    for part in parts.values():
        if seq_len is not None and "seq_len" in part:
            part.seq_len = seq_len
    values: Any = OmegaConf.to_container(parts, resolve=True)
    return {name: part.get(key, 1) for name, part in values.items()}


RESOLVERS = (
    locations.default_output_dir, locations.expand_home, os.path.abspath, job_folder, plus,
    default_seq_len, of_parts,
)  # fmt: skip


@contextmanager
def open_hydra(words: Sequence[str] = ()) -> Generator[Any, None, None]:
    """Initialize Hydra with gptrain's resolvers and both conf/ folders, and yield its main object.

    An error of Hydra in the block becomes a ConfigError, which names one of `words` if it can.
    After the block Hydra's earlier state is restored.
    """
    # The config keeps the first value of run_stamp, so that a job of a sweep that runs in another
    # process has the same time in its folder name.
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
    for resolver in RESOLVERS:
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
    Plugins.instance().register(LibraryChoices)
    conf = str(locations.find_conf() or locations.LIBRARY / "conf")
    with initialize_config_dir(conf, job_name="train", version_base="1.3"):
        try:
            yield GlobalHydra.instance().hydra
        except RunError:
            raise
        except Exception as error:  # Hydra does not wrap all errors of overrides and yaml files
            raise ConfigError([_explain(error, words)]) from error


def compose_words(words: Sequence[str], schema: type[RunConfig] = RunConfig) -> DictConfig:
    """Compose the config of a command line, with Hydra's own node.

    Raises a ConfigError with all words that Hydra refuses and, if there are any, all wrong values
    of the others.
    """
    problems, accepted = [], [*words]
    with open_hydra(words):
        while True:
            try:
                cfg = compose("train", accepted, return_hydra_config=True)
                break
            except Exception as error:
                problems.append(_explain(error, accepted))
                left = [word for word in accepted if key_of(word) != problems[-1].key]
                if left == accepted:  # the error names no word
                    raise
                accepted = left
    if not problems:
        HydraConfig.instance().set_config(cfg)  # for references to Hydra's own node
        return cfg
    known = flatten(OmegaConf.to_container(cfg, resolve=False))
    for problem in problems:
        if problem.message == UNKNOWN:
            problem.message += _did_you_mean(problem.key, known)
    try:
        typed(plain(cfg), schema)
    except ConfigError as error:
        problems += error.problems
    raise ConfigError(problems)


def key_of(word: str) -> str:
    """Return the key of an override, such as `a.b` for `+a.b=1`."""
    return word.partition("=")[0].lstrip("+~")


def _explain(error: Exception, words: Sequence[str]) -> ConfigIssue:
    """Return the problem of the override that Hydra refused, if its error names one."""
    text = " ".join(str(error.__cause__ or error).partition("Config search path")[0].split())
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return ConfigIssue(key_of(key), value or None, text, hint=value and option(key, value))
    for word in reversed(words):
        key, value = key_of(word), word.partition("=")[2] or None
        if re.search(rf"(?:'|for ){re.escape(key)}(?:['/=\s]|\.\s)", str(error)):
            is_unknown = str(error).startswith("Could not override")
            return ConfigIssue(key, value, UNKNOWN if is_unknown else text)
    return ConfigIssue("", None, text)


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    """Return the end of a message with the known key that is most similar, or an empty string."""
    names = {*known, *(name.split(".")[0] for name in known)}
    leaf = key.rpartition(".")[2]  # the group of the key may be missing or wrong
    same_leaf = sorted((name for name in known if name.endswith(f".{leaf}")), key=len)
    same_letters = [name for name in names if sorted(name) == sorted(key)]
    near = same_letters or get_close_matches(key, names, 1, cutoff=0.75) or same_leaf
    return f", did you mean {near[0]}? (new keys need +)" if near else ""


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a config as nested dicts with all references resolved, without Hydra's own node.

    `model.vocab_size=auto` is replaced by its `vocabulary_size`. A reference that cannot be
    resolved, or a required value that is missing, is a ConfigError.
    """
    keys: list[Any] = [key for key in cfg if key != "hydra"]  # a key may be an integer
    cfg = OmegaConf.masked_copy(cfg, keys)
    try:
        if OmegaConf.select(cfg, VOCAB) == AUTO:
            cfg.model.vocab_size = vocabulary_size(cfg)  # other keys may refer to it
        return cast(Any, OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or ""
        raise ConfigError.of(key, None, first_line(error)) from error


def vocabulary_size(cfg: DictConfig) -> int:
    """Return what `model.vocab_size=auto` stands for, rounded up to `model.vocab_multiple`.

    It is that in the config.json of `model.path`, or else that of the largest tokenizer in the data
    group. A ConfigError if neither can be read.
    """
    size = 0
    if path := cfg.model.get("path"):
        facts = read_facts(locations.expand_home(path) / "config.json")
        # A model that also reads images has a config of its text.
        size = (facts.get("text_config") or facts).get("vocab_size")
        if not isinstance(size, int):
            message = "no config.json with a vocab_size"
            raise ConfigError.of("model.path", path, message, code=errors.INPUT_NOT_FOUND)
    else:
        values = cast(Any, OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
        for key, name in flatten(values.get("data"), "data").items():
            is_of_part = ".train." in key or ".val." in key
            # "bpe" learns a vocabulary of the net's size.
            if key.endswith(".tokenizer") and name and name != "bpe" and not is_of_part:
                size = max(size, _count_tokens(key, name))
    if not size:
        message = "neither data.tokenizer nor model.path has a vocabulary"
        raise ConfigError.of(VOCAB, AUTO, message, hint=f"{VOCAB}=50304")
    multiple = cfg.model.get("vocab_multiple") or 1
    return -(-size // multiple) * multiple


def _count_tokens(key: str, name: str) -> int:
    """Return the highest token id of a tokenizer plus 1. A missing file is an error of `key`."""
    from gptrain.data.tokenizers import load_tokenizer  # imports torch

    try:
        return load_tokenizer(name).vocab_size
    except FileNotFoundError as error:
        raise ConfigError.of(key, name, first_line(error), code=errors.INPUT_NOT_FOUND) from error


def typed(values: dict[str, Any], schema: type[RunConfig]) -> RunConfig:
    """Return the typed config, or raise a ConfigError with a problem for each wrong key."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        refusals = error.errors(include_url=False)
    problems: dict[tuple[str, str | None], list[str]] = {}  # a union has a message per member
    for details in refusals:
        node: Any = values
        keys = []
        for part in details["loc"]:  # the names of the members of a union are no keys
            if isinstance(node, dict) and part in node:
                node = node[part]
                keys.append(str(part))
        is_missing = details["type"] == "missing"
        key = ".".join([*keys, str(details["loc"][-1])] if is_missing else keys)
        message = details["msg"].removeprefix("Value error, ")
        if details["type"] == "extra_forbidden":
            message = f"{UNKNOWN}{_did_you_mean(key, flatten(values).keys() - {key})}"
        message = message.replace("Input should be", "must be")
        problems.setdefault((key, None if is_missing else show(node)), []).append(message)
    texts = {place: " or ".join(dict.fromkeys(messages)) for place, messages in problems.items()}
    raise ConfigError([ConfigIssue(key, shown, text) for (key, shown), text in texts.items()])

"""Composes a config from overrides with Hydra, on the conf/ of the project and of the library."""

import copy
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gptrain.config.overrides import REFUSALS, explain, line_of, parse
from gptrain.config.vocabulary import AUTO, vocabulary_size
from gptrain.core import locations
from gptrain.core.errors import ConfigError, ConfigIssue, first_line
from gptrain.runtime.process import run_stamp

LONGEST_NAME = 80  # characters of the name of a job's folder
SHORT_SEQ_LEN = 128  # default data.seq_len of a net that does not name its context length
# Largest default data.seq_len: longer contexts are an extension of a trained net.
LONG_SEQ_LEN = 8192


class LibraryChoices(SearchPathPlugin):
    """Hydra plugin that adds the library's conf/ behind the project's conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the library's conf/ to Hydra's search path. Hydra calls this method."""
        search_path.append(provider="gptrain", path="pkg://gptrain.conf")


def job_folder(number: int, varied: str) -> str:
    """Return the folder name of a sweep's job, such as `3-lr_0.001-seed_1`.

    TensorBoard shows the same name. The name has at most LONGEST_NAME characters, none of which is
    special to a shell or to Hydra. A number with four decimals or more is rounded to three
    significant digits.

    Args:
        number: Index of the job in the sweep.
        varied: The overrides that differ between jobs, `key=value`, joined by spaces.
    """
    name = re.sub(r"[\w./@+]*?(\w+)=", r"\1_", varied)
    name = re.sub(r"\d*\.\d{4,}(e-?\d+)?", lambda match: f"{float(match[0]):.3g}", name)
    return re.sub(r"[^\w.+-]+", "-", f"{number}-{name}")[:LONGEST_NAME].strip("-.")


def plus(left: Any, right: int) -> Any:
    """Return left + right, or `left` unchanged if it is not an integer.

    The yaml files of conf/ call it as a resolver of OmegaConf: `${plus:${seed},1}`. If the value of
    a key has a wrong type, only that key is then reported, not every key that refers to it.

    Args:
        left: Value of a key.
        right: Number to add.
    """
    return left + right if isinstance(left, int) else left


def default_seq_len(model: Any, shortest: int = 1) -> int:
    """Return the default of `data.seq_len`: the context length of the net, at most LONG_SEQ_LEN.

    The yaml files of conf/ call it as a resolver of OmegaConf.

    Args:
        model: Node `model` of the config. If its `max_seq_len` is missing or not an integer, the
            result is SHORT_SEQ_LEN. The check of that key reports a wrong type.
        shortest: Smallest context length that is used. A net with a shorter context gets
            SHORT_SEQ_LEN.
    """
    length = model.get("max_seq_len") if isinstance(model, DictConfig) else None
    if type(length) is not int or length < shortest:
        return SHORT_SEQ_LEN
    return min(length, LONG_SEQ_LEN)


def of_parts(parts: Any, key: str, seq_len: int | None = None) -> Any:
    """Return the value of one key in each part of a data mixture, by the name of the part.

    The yaml files of conf/ call it as a resolver of OmegaConf: `${of_parts:${data.parts},weight}`.

    Args:
        parts: Node `data.parts`.
        key: Key of a part: `train`, `val` or `weight`. A part without the key gets 1.
        seq_len: Number of positions that replaces `seq_len` in each part that has this key. None
            keeps the values of the parts.
    """
    values = {}
    for name, part in parts.items():
        part = copy.copy(part)
        if seq_len is not None and "seq_len" in part:
            part.seq_len = seq_len
        node = part.get(key, 1)
        is_node = OmegaConf.is_config(node)
        values[name] = OmegaConf.to_container(node, resolve=True) if is_node else node
    return values


def compose_and_explain(overrides: list[str]) -> tuple[DictConfig, list[ConfigIssue]]:
    """Compose the config from all overrides that fit.

    Args:
        overrides: Words of a command line, in their order.

    Returns:
        The config, with Hydra's own node, and a problem for each override that was left out.

    Raises:
        Exception: The error of Hydra, OmegaConf or YAML if not even the defaults can be composed.
    """
    parsed, problems = parse(overrides)
    with open_hydra() as hydra:
        try:
            return _compose([line_of(override) for override in parsed]), problems
        except REFUSALS:
            cfg = _compose([])
        fitting: list[str] = []
        choices = hydra.config_loader.get_group_options
        # Compose in Hydra's order: first the search path, then the groups, then single keys.
        parsed.sort(key=lambda override: not choices(override.key_or_group))
        parsed.sort(key=lambda override: override.key_or_group != "hydra.searchpath")
        for override in parsed:
            try:
                cfg = _compose([*fitting, line_of(override)])
                fitting.append(line_of(override))
            except REFUSALS as error:
                problems.append(explain(override, error, plain(cfg), choices))
        return cfg, problems


def plain(cfg: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """Return a config as nested dicts, without Hydra's own node.

    Args:
        cfg: Composed config.
        resolve: Whether to replace each reference by its value, and `model.vocab_size=auto` by a
            number.

    Raises:
        OmegaConfBaseException: If `resolve` is true, and a required key has no value
            (MissingMandatoryValue) or a reference cannot be resolved.
        ConfigError: If `resolve` is true, and no file gives the size of the vocabulary.
    """
    keys: list[Any] = [key for key in cfg if key != "hydra"]  # a key may be an integer
    cfg = OmegaConf.masked_copy(cfg, keys)
    values = OmegaConf.to_container(cfg, resolve=resolve, throw_on_missing=resolve)
    values = cast(dict[str, Any], values)
    model = values.get("model")
    if resolve and isinstance(model, dict) and model.get("vocab_size") == AUTO:
        cfg.model.vocab_size = vocabulary_size(values)  # other keys may refer to it
        return plain(cfg, resolve=True)
    return values


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Return a config as nested dicts with all references resolved, without Hydra's own node.

    `model.vocab_size=auto` is replaced by the number that the files of the tokenizers or the model
    give.

    Args:
        cfg: Composed config.

    Raises:
        ConfigError: If a required key is not set, a reference cannot be resolved, or no file gives
            the size of the vocabulary.
    """
    try:
        return plain(cfg, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        is_unset = isinstance(error, MissingMandatoryValue)
        message = "required and not set" if is_unset else f"cannot be resolved: {first_line(error)}"
        key = getattr(error, "full_key", None) or ""
        raise ConfigError.of(key, None, message) from error


@contextmanager
def open_hydra() -> Generator[Any, None, None]:
    """Initialize Hydra with gptrain's resolvers, and yield Hydra's main object.

    Hydra reads the conf/ of the project and, behind it, that of the library, or only the latter if
    there is no project. After the block Hydra's earlier state is restored, but the resolvers and
    gptrain's search path plugin stay registered in this process.
    """
    # The config keeps the first value of run_stamp, so that a job of a sweep that runs in another
    # process has the same time in its folder name.
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
    for resolver in (
        locations.default_output_dir, locations.expand_home, job_folder, default_seq_len, of_parts,
        plus,
    ):  # fmt: skip
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
    Plugins.instance().register(LibraryChoices)
    conf = str(locations.find_conf() or locations.LIBRARY / "conf")
    with initialize_config_dir(conf, job_name="train", version_base="1.3"):
        yield GlobalHydra.instance().hydra


def _compose(overrides: list[str]) -> DictConfig:
    """Compose and return the config of train.py, with Hydra's own node.

    Call it in a block of `open_hydra`.

    Raises:
        Exception: One of those in REFUSALS, if an override does not fit.
    """
    return compose("train", overrides, return_hydra_config=True)

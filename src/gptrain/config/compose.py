"""From overrides to a config, by Hydra's public API; what it refuses becomes one line each."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptrain.config.values import unknown_choice, unknown_key, walk
from gptrain.core import locations
from gptrain.core.errors import ConfigIssue, first_line, quoted
from gptrain.core.shell import command
from gptrain.runtime.process import run_stamp

LONGEST_NAME = 80  # of a job's folder
# What Hydra raises on words that it cannot use; not all of it is wrapped.
REFUSALS = (
    HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, KeyError,
    AttributeError, OSError, RecursionError, AssertionError,
)  # fmt: skip


class LibraryChoices(SearchPathPlugin):
    """Where Hydra looks for a choice that the project's conf/ does not have."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="gptrain", path="pkg://gptrain.conf")


def job_folder(number: int, varied: str) -> str:
    """Name of a job's folder, which is its name in TensorBoard: 3-lr_0.001-seed_1.

    No longer than LONGEST_NAME, of characters that neither a shell nor Hydra takes for its own.

    Args:
        varied: key=value of what the sweep varies, joined by spaces.
    """
    name = re.sub(r"[\w./@+]*?(\w+)=", r"\1_", varied)
    name = re.sub(r"\d*\.\d{4,}(e-?\d+)?", lambda found: f"{float(found[0]):.3g}", name)
    return re.sub(r"[^\w.+-]+", "-", f"{number}-{name}")[:LONGEST_NAME].strip("-.")


def plus(left: Any, right: int) -> Any:
    """The sum; what is no integer stays as it is, and its own key is found wrong."""
    return left + right if isinstance(left, int) else left


def of_parts(parts: Any, key: str, seq_len: int | None = None) -> Any:
    """What each part of a data mixture has under a key; with samples of seq_len positions."""
    found = {}
    for name, part in parts.items():
        part = copy.copy(part)
        if seq_len is not None and "seq_len" in part:
            part.seq_len = seq_len
        node = part.get(key, 1)
        found[name] = OmegaConf.to_container(node, resolve=True) if key != "weight" else node
    return found


def parse(overrides: list[str]) -> tuple[list[Override], list[ConfigIssue]]:
    """Overrides as Hydra reads them, those of a sweep included, and a problem for each other."""
    parsed, problems = [], []
    for line in overrides:
        key, equals, value = line.partition("=")
        with suppress(*REFUSALS):
            (one,) = OverridesParser.create().parse_overrides([line])
            if one.key_or_group:
                parsed.append(one)
                continue
        if equals and key.strip("+~ "):
            hint = command(f"{key}={quoted(value)}")
            problems.append(ConfigIssue(key.lstrip("+~"), value, "cannot be read", hint=hint))
        else:
            problems.append(ConfigIssue("", None, f"{line}: not key=value", hint="--help"))
    return parsed, problems


def line_of(one: Override) -> str:
    """An override as it was typed."""
    return one.input_line or ""


def compose_and_explain(overrides: list[str]) -> tuple[DictConfig, list[ConfigIssue]]:
    """The config of the overrides that fit, and a problem for each that does not.

    Raises: REFUSALS, where not even the defaults can be composed.
    """
    parsed, problems = parse(overrides)
    with open_hydra() as hydra:
        try:
            return _compose([line_of(one) for one in parsed]), problems
        except REFUSALS:
            cfg, good = _compose([]), []
        choices = hydra.config_loader.get_group_options
        # Groups first, as Hydra does; before them where to look for their choices.
        parsed.sort(key=lambda one: not choices(one.key_or_group))
        parsed.sort(key=lambda one: one.key_or_group != "hydra.searchpath")
        for one in parsed:
            try:
                cfg = _compose([*good, line_of(one)])
                good.append(line_of(one))
            except REFUSALS as error:
                problems.append(_explain(one, error, cfg, choices))
        return cfg, problems


def plain(cfg: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """A config as nested dicts, without Hydra's own node, with references or what they mean."""
    keys: list[Any] = [key for key in cfg if key != "hydra"]  # not each is a text
    cfg = OmegaConf.masked_copy(cfg, keys)
    found = OmegaConf.to_container(cfg, resolve=resolve, throw_on_missing=resolve)
    return cast(dict[str, Any], found)


@contextmanager
def open_hydra() -> Generator[Any, None, None]:
    """Hydra's own object on the project's conf/, or the library's alone, with their resolvers."""
    # Kept in the config, so that a job of a sweep in another process has this one's time, too.
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
    for resolver in (locations.default_output_dir, job_folder, of_parts, plus):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
    Plugins.instance().register(LibraryChoices)
    conf = str(locations.find_conf() or locations.LIBRARY / "conf")
    with initialize_config_dir(conf, job_name="train", version_base="1.3"):
        yield GlobalHydra.instance().hydra


def _compose(overrides: list[str]) -> DictConfig:
    return compose("train", overrides, return_hydra_config=True)


def _explain(
    one: Override, error: Exception, cfg: DictConfig, choices: Callable[[str], list[str]]
) -> ConfigIssue:
    """Why an override does not fit: no such choice, no such key."""
    key, value = one.key_or_group, line_of(one).partition("=")[2] or None
    if one.is_sweep_override():
        hint = f"-m for a sweep, or {command(f'{key}=[{value}]')} for a list"
        return ConfigIssue(key, value, "several values, and this is no sweep", hint=hint)
    group = key.removesuffix(".name")  # of a choice, as elsewhere
    if names := choices(group):
        if not isinstance(error, MissingConfigException) and group == key:
            message = f"cannot be composed: {first_line(error)}"
            return ConfigIssue(key, value, message, ", ".join(names))
        return unknown_choice(key, str(value), names, group)
    values = plain(cfg)
    if key in dict(walk(values)) or key.startswith("hydra."):
        return ConfigIssue(key, value, first_line(error.__cause__ or error))
    return unknown_key(key, value, values)

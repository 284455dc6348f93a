"""From overrides to a config, by Hydra's public API; what it refuses becomes one line each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptrain.config.schema import unknown_key
from gptrain.config.suggest import find_alias, nearest
from gptrain.launch.process import run_stamp
from gptrain.problems import ConfigError, Problem

PROJECT = Path(__file__).resolve().parents[3]
CONF = str(PROJECT / "conf")
# What Hydra raises on words that it cannot use; not all of it is wrapped.
REFUSALS = (
    HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, KeyError,
    AttributeError, OSError, RecursionError, AssertionError,
)  # fmt: skip
PLUGINS = {  # choice -> what to install for it
    "hydra/sweeper=optuna": "hydra-optuna-sweeper",
    "hydra/launcher=submitit_local": "hydra-submitit-launcher",
    "hydra/launcher=submitit_slurm": "hydra-submitit-launcher",
}


@dataclass(frozen=True)
class Place:
    """Where configs are looked for: Hydra's --config-path, --config-name and --config-dir."""

    config_path: str = CONF
    config_name: str = "train"
    config_dir: str | None = None


def register_resolvers() -> None:
    """Makes our resolvers known to OmegaConf."""
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("default_output_dir", default_output_dir, replace=True)
    OmegaConf.register_new_resolver("plus", lambda left, right: left + right, replace=True)


def default_output_dir() -> str:
    """GPTRAIN_OUTPUT_DIR, or outputs/ of the project, wherever the command is typed."""
    return os.environ.get("GPTRAIN_OUTPUT_DIR") or str(PROJECT / "outputs")


def parse(overrides: list[str]) -> list[Override]:
    """Overrides as Hydra reads them, those of a sweep included.

    Raises: ConfigError, naming each that cannot be read.
    """
    parsed, problems = [], []
    for line in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([line])
            if not parsed[-1].key_or_group:
                problems.append(Problem("", None, f"{line}: no key", attempt="key=value"))
        except REFUSALS:
            problems.append(_unreadable(line))
    if problems:
        raise ConfigError(problems)
    return parsed


def compose_config(overrides: list[str], place: Place = Place()) -> DictConfig:
    """The config that these overrides compose, with Hydra's own node. Raises: REFUSALS."""
    with _hydra(place) as loader:
        return _compose(overrides, place, loader)


def compose_or_explain(overrides: list[str], place: Place = Place()) -> DictConfig:
    """compose_config, with a line for each override that does not fit.

    Raises: ConfigError.
    """
    parsed = parse(overrides)
    with _hydra(place) as loader:
        try:
            return _compose(overrides, place, loader)
        except REFUSALS as error:
            whole = error
        is_group = {id(one): bool(_choices(loader, one.key_or_group)) for one in parsed}
        good, problems = [], []
        for one in sorted(parsed, key=lambda one: not is_group[id(one)]):
            try:
                cfg = _compose([*good, one.input_line], place, loader)
                good.append(one.input_line)
            except REFUSALS as error:
                cfg = _compose(good, place, loader) if good or parsed else None
                problems.append(_explain(one, error, cfg, loader))
        raise ConfigError(problems or [Problem("", None, f"cannot be composed: {_first(whole)}")])


@contextmanager
def _hydra(place: Place) -> Iterator[ConfigLoader]:
    register_resolvers()
    with initialize_config_dir(place.config_path, job_name="train", version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _compose(overrides: list[str], place: Place, loader: ConfigLoader) -> DictConfig:
    extra = []
    if place.config_dir is not None:
        extra = [f"hydra.searchpath=['file://{os.path.abspath(place.config_dir)}']"]
    return compose(place.config_name, [*extra, *overrides], return_hydra_config=True)


def _choices(loader: ConfigLoader, group: str) -> list[str]:
    return loader.get_group_options(group.split("@")[0])


def _explain(one: Override, error: Exception, cfg: DictConfig, loader: ConfigLoader) -> Problem:
    """Why an override does not fit: no such choice, no such key."""
    key, value = one.key_or_group, (one.input_line or "").partition("=")[2] or None
    if one.is_sweep_override():
        attempt = f"-m for a sweep, or '{key}=[{value}]' for a list"
        return Problem(key, value, "several values, and this is no sweep", attempt=attempt)
    known = _choices(loader, key)
    if known:
        if plugin := PLUGINS.get(f"{key}={value}"):
            return Problem(key, value, "needs a plugin", attempt=f"pip install {plugin}")
        near = nearest(str(value), known)
        words = "no such choice" + (f', did you mean "{near}"?' if near else "")
        if str(value) in known or not isinstance(error, MissingConfigException):
            words = f"cannot be composed: {_first(error)}"
        return Problem(key, value, words, ", ".join(known), find_alias(key, str(value)) or "")
    group, _, leaf = key.rpartition(".")
    if leaf == "name" and (names := _choices(loader, group)):
        near = nearest(str(value), names)
        words = "unknown" + (f', did you mean "{near}"?' if near else "")
        return Problem(key, value, words, ", ".join(names), f"{group}={near or names[0]}")
    there = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
    if one.is_add() and there is not None:
        plain = (one.input_line or "").lstrip("+")
        return Problem(key, value, "is there already, no + is needed", attempt=plain)
    parent = OmegaConf.select(cfg, group, throw_on_resolution_failure=False) if group else cfg
    if group and parent is not None and not OmegaConf.is_config(parent):
        words = f"unknown key, {group} is one value"
        return Problem(key, value, words, attempt=f"{group}={value}")
    return unknown_key(key, value, _raw(cfg))


def _raw(cfg: DictConfig) -> dict[str, Any]:
    return {key: value for key, value in OmegaConf.to_container(cfg).items() if key != "hydra"}


def _unreadable(line: str) -> Problem:
    key, has_value, value = line.partition("=")
    if not has_value:
        return Problem("", None, f"{line}: no key=value", attempt=f"{line}=<value>, or --help")
    if not key.strip("+~ "):
        return Problem("", None, f"{line}: no key", attempt="key=value")
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return Problem(key.lstrip("+~"), value, "cannot be read", attempt=f"\"{key}='{escaped}'\"")


def _first(error: object) -> str:
    """The first line of a message, and the next where the first only says where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return re.sub(r"\s+", " ", found) or type(error).__name__

"""From overrides to a config, by Hydra's public API; what it refuses becomes one line each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptrain.config.suggest import find_alias, nearest
from gptrain.config.values import unknown_key
from gptrain.launch.process import run_stamp
from gptrain.problems import Problem, first_line

PROJECT = Path(__file__).resolve().parents[3]
# What Hydra raises on words that it cannot use; not all of it is wrapped.
REFUSALS = (
    HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, KeyError,
    AttributeError, OSError, RecursionError, AssertionError,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where configs are looked for: Hydra's --config-name and --config-dir."""

    config_name: str = "train"
    config_dir: str | None = None


CONF, ANYWHERE = str(PROJECT / "conf"), Place()


def register_resolvers() -> None:
    """Makes our resolvers known to OmegaConf."""
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("default_output_dir", default_output_dir, replace=True)
    OmegaConf.register_new_resolver("plus", lambda left, right: left + right, replace=True)


def default_output_dir() -> str:
    """GPTRAIN_OUTPUT_DIR, or outputs/ of the project, wherever the command is typed."""
    return os.environ.get("GPTRAIN_OUTPUT_DIR") or str(PROJECT / "outputs")


def parse(overrides: list[str]) -> tuple[list[Override], list[Problem]]:
    """Overrides as Hydra reads them, those of a sweep included, and a problem for each other."""
    parsed, problems = [], []
    for line in overrides:
        key, has_value, value = line.partition("=")
        try:
            (one,) = OverridesParser.create().parse_overrides([line])
            if one.key_or_group:
                parsed.append(one)
                continue
        except REFUSALS:
            pass
        if not has_value or not key.strip("+~ "):
            attempt = "key=value, or --help"
            problems.append(Problem("", None, f"{line}: not key=value", attempt=attempt))
            continue
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        attempt = f"\"{key}='{escaped}'\""
        problems.append(Problem(key.lstrip("+~"), value, "cannot be read", attempt=attempt))
    return parsed, problems


def compose_config(overrides: list[str], place: Place = ANYWHERE) -> DictConfig:
    """The config that these overrides compose, with Hydra's own node. Raises: REFUSALS."""
    with _hydra(place):
        return _compose(overrides, place)


def compose_and_explain(
    overrides: list[str], place: Place = ANYWHERE
) -> tuple[DictConfig, list[Problem]]:
    """The config of the overrides that fit, and a problem for each that does not.

    Raises: REFUSALS, where not even the defaults can be composed.
    """
    parsed, problems = parse(overrides)
    with _hydra(place) as loader:
        try:
            return _compose([one.input_line for one in parsed], place), problems
        except REFUSALS:
            cfg, good = _compose([], place), []
        parsed.sort(key=lambda one: not _choices(loader, one))  # groups first, as Hydra does
        for one in parsed:
            try:
                cfg = _compose([*good, one.input_line], place)
                good.append(one.input_line)
            except REFUSALS as error:
                problems.append(_explain(one, error, cfg, loader))
        return cfg, problems


@contextmanager
def _hydra(place: Place) -> Iterator[ConfigLoader]:
    register_resolvers()
    with initialize_config_dir(CONF, job_name="train", version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _compose(overrides: list[str], place: Place) -> DictConfig:
    if place.config_dir is not None:
        folder = os.path.abspath(place.config_dir)
        overrides = [f"hydra.searchpath=['file://{folder}']", *overrides]
    return compose(place.config_name, overrides, return_hydra_config=True)


def _choices(loader: ConfigLoader, one: Override) -> list[str]:
    return loader.get_group_options(one.key_or_group)


def _explain(one: Override, error: Exception, cfg: DictConfig, loader: ConfigLoader) -> Problem:
    """Why an override does not fit: no such choice, no such key."""
    key, value = one.key_or_group, one.input_line.partition("=")[2] or None
    group, _, leaf = key.rpartition(".")
    if one.is_sweep_override():
        attempt = f"-m for a sweep, or '{key}=[{value}]' for a list"
        return Problem(key, value, "several values, and this is no sweep", attempt=attempt)
    known = _choices(loader, one)
    names = known or (loader.get_group_options(group) if leaf == "name" else [])
    if names:
        near = nearest(str(value), names)
        words = "unknown" + (f', did you mean "{near}"?' if near else "")
        if not isinstance(error, MissingConfigException) and known:
            words = f"cannot be composed: {first_line(error)}"
        attempt = find_alias(key, str(value)) or (
            f"{key if known else group}={near}" if near else ""
        )
        return Problem(key, value, words, ", ".join(names), attempt)
    there = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
    if there is not None:
        words = "is there already, no + is needed" if one.is_add() else first_line(error)
        return Problem(key, value, words, attempt=one.input_line.lstrip("+") * one.is_add())
    parent = OmegaConf.select(cfg, group, throw_on_resolution_failure=False) if group else cfg
    if parent is not None and not OmegaConf.is_config(parent):
        words = f"unknown key, {group} is one value"
        return Problem(key, value, words, attempt=f"{group}={value}")
    return unknown_key(key, value, OmegaConf.to_container(cfg))

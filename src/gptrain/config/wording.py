"""What Hydra and OmegaConf refuse, said in one line with a way out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
)

from gptrain.config.checks.keys import SET_ELSEWHERE, answer_unknown, known_keys
from gptrain.config.checks.rules import Flag
from gptrain.config.checks.values import judge, rule_of
from gptrain.config.habits import answer_habit
from gptrain.config.names import nearest
from gptrain.problems import Problem

Choices = Callable[[str], list[str]]
# Hydra's plugins by the choice that needs them.
PLUGINS = {
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
    "hydra/sweeper/ax": "hydra-ax-sweeper",
    "hydra/sweeper/nevergrad": "hydra-nevergrad-sweeper",
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/launcher/submitit_local": "hydra-submitit-launcher",
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
}


OPEN_GROUPS = ("model", "data", "optimizer", "scheduler", "callbacks", "logger", "profiler")


def explain_parse(line: str, error: Exception | None, sweep: Override | None = None) -> Problem:
    """A word that Hydra's grammar does not read, or reads as a sweep."""
    key, has_value, value = line.partition("=")
    name = key.lstrip("+~") or line
    if sweep is not None:
        attempt = f"-m for a sweep, or '{key}=[{value}]' for a list"
        if re.fullmatch(r"\w+\(.*\)", value, re.DOTALL):
            attempt = "-m for a sweep"
        return Problem(name, value, "several values, and this is no sweep", attempt=attempt)
    if not has_value and not line.startswith("~"):
        return Problem("", None, f"{line}: no key=value", attempt=f"{line}=<value>, or --help")
    if not name.strip() or name == line:
        return Problem("", None, f"{line}: cannot be read, no key", attempt="key=value")
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    reason = first_line(error)
    wrong = "cannot be read" + (f" ({reason})" if "Lexer" not in reason else "")
    return Problem(name, value, wrong, attempt=f"\"{key}='{escaped}'\"")


def explain_group(override: Override, choices: Choices) -> Problem | None:
    """A choice that its group does not have; None where all is well."""
    group, value = override.key_or_group, override.value()
    if group == "hydra.searchpath":
        return _explain_search_path(override)
    if override.is_delete():
        return None
    known = choices(group)
    picked = value if isinstance(value, list) else [value]
    for choice in picked:
        shown = text_of(override)
        if not isinstance(choice, str):
            attempt = f"{group}=none" if "none" in known else f"{group}={known[0]}"
            return Problem(group, shown, "not a choice", ", ".join(known), attempt)
        if choice.removesuffix(".yaml") in known or "/" in choice or "${" in choice:
            continue
        plugin = PLUGINS.get(f"{group}/{choice}")
        if plugin:
            return Problem(group, shown, "needs a plugin", attempt=f"pip install {plugin}")
        habit = answer_habit(group, str(choice))
        near = nearest(choice, known)
        wrong = "no such choice" + (f', did you mean "{near}"?' if near else "")
        return Problem(group, shown, wrong, ", ".join(known), habit or "")
    return None


def _explain_search_path(override: Override) -> Problem | None:
    """Hydra only warns of a folder that is not there."""
    places = override.value()
    if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
        wrong = "not a list of places"
        attempt = "'hydra.searchpath=[file:///folder]'"
        return Problem("hydra.searchpath", text_of(override), wrong, attempt=attempt)
    for place in places:
        folder = place.removeprefix("file://")
        if not place.startswith("pkg://") and not os.path.isdir(folder):
            return Problem("hydra.searchpath", text_of(override), f"{folder}: no such folder")
    return None


def explain_before(override: Override, cfg: DictConfig) -> Problem | None:
    """What OmegaConf would accept in silence: 5 for true, keys below a number."""
    key, value = override.key_or_group, text_of(override)
    parts = key.split(".")
    for i in range(1, len(parts)):
        parent = ".".join(parts[:i])
        node = OmegaConf.select(cfg, parent, throw_on_resolution_failure=False)
        if node is not None and not isinstance(node, DictConfig | ListConfig):
            return Problem(
                key, value, f"unknown key, {parent} is one value", "", f"{parent}={value}"
            )
    if isinstance(rule_of(key), Flag) and not override.is_delete():
        found = judge(key, override.value())
        habit = answer_habit(key, value or "") if found else None
        return Problem(key, value, found[0], found[1], habit or found[2]) if found else None
    return None


def explain_value(
    override: Override, error: Exception, cfg: DictConfig, choices: Choices
) -> Problem:
    """A value that could not be put at its key: an unknown key, or one of another type."""
    key, value = override.key_or_group, text_of(override)
    cause = error.__cause__ if error.__cause__ is not None else error
    if key == "":
        return Problem("", None, f"{override.input_line}: no key", attempt="key=value")
    habit = answer_habit(key, value or "")
    missing = isinstance(cause, ConfigAttributeError | ConfigKeyError)
    if missing or override.package is not None or _is_unknown(override, cfg):
        return _unknown_key(override, key, value, habit, cfg, choices)
    found = judge(key, override.value())
    if habit:
        return Problem(key, value, found[0] if found else "not a value of this key", "", habit)
    if found:
        return Problem(key, value, *found)
    there = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
    if override.is_add() and there is not None:
        plain = override.input_line.lstrip("+")
        return Problem(key, value, "is there already, no + is needed", attempt=plain)
    if _is_mapping(cfg, key) and not isinstance(override.value(), dict):
        attempt = f"{key}.<key>=<value>"
        return Problem(key, value, "a group of keys, not one value", attempt=attempt)
    return Problem(key, value, _of_type(cause))


def explain_base(line: str, error: Exception) -> Problem:
    """A group or a yaml of the user's own that cannot be composed."""
    key, _, value = line.partition("=")
    missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    if missing in PLUGINS:
        plugin = PLUGINS[missing]
        return Problem(key, value or None, f"needs {missing}", attempt=f"pip install {plugin}")
    group = re.escape(key.lstrip("+"))
    if re.search(f"Could not override '[^']*@{group}\\.|Key '{group}' (is )?not in ", str(error)):
        wrong = f"its keys are put below {key}, where nothing reads them"
        attempt = "# @package _global_ as the first line of its yaml"
        return Problem(key, value or None, wrong, attempt=attempt)
    said = " ".join(str(error).split()) if isinstance(error, yaml.YAMLError) else _reason(error)
    unknown = re.search(r"Key '\w+' (?:is )?not in .*full_key: (\S+)", str(error), re.DOTALL)
    if unknown:
        said = f"{unknown[1]}: {answer_unknown(unknown[1], known_keys())[0]}"
    wrong = said if unknown else f"cannot be composed: {said}"
    attempt = f"{key.split('@')[0]}={value}" if "@" in key else ""
    return Problem(key, value or None, wrong, attempt=attempt)


def _unknown_key(
    override: Override,
    key: str,
    value: str | None,
    habit: str | None,
    cfg: DictConfig,
    choices: Choices,
) -> Problem:
    typed = key.replace("/", ".").split("@")[0]
    if habit:
        return Problem(key, value, "unknown key", attempt=habit)
    group, _, leaf = typed.rpartition(".")
    known = choices(group) if leaf == "name" else []
    if known:
        near = nearest(value or "", known)
        wrong = "unknown" + (f', did you mean "{near}"?' if near else "")
        return Problem(key, value, wrong, ", ".join(known), f"{group}={near or known[0]}")
    there = set(_keys(cfg))
    if typed in known_keys() - there:
        return _of_another_choice(typed, value, cfg)
    elsewhere = {name for name in known_keys() if not group or not name.startswith(f"{group}.")}
    wrong, attempt = answer_unknown(typed, elsewhere | there)
    parent = None
    is_set_elsewhere = group == "trainer" and leaf in SET_ELSEWHERE
    if group and not is_set_elsewhere and "did you mean" not in wrong:
        parent = OmegaConf.select(cfg, group, throw_on_resolution_failure=False)
    siblings = ", ".join(map(str, parent)) if isinstance(parent, DictConfig) else ""
    if typed.split(".")[0] in OPEN_GROUPS and not override.is_delete():
        wrong += " (new keys need +)"
    return Problem(key, value, wrong, siblings, attempt)


def _of_another_choice(key: str, value: str | None, cfg: DictConfig) -> Problem:
    """A key that other choices of its group have, or that was deleted."""
    group = key.partition(".")[0]
    choice = OmegaConf.select(cfg, f"hydra.runtime.choices.{group}")
    head = f"{group}={choice}" if choice else group
    node = cfg.get(group)
    names = [name for name in node if name != "_target_"] if isinstance(node, DictConfig) else []
    return Problem(key, value, f"{head} has no such key", ", ".join(names))


def text_of(override: Override) -> str | None:
    """The value as it was typed; None for a bare `~key`."""
    _, has_value, value = (override.input_line or "").partition("=")
    return value if has_value else None


def first_line(error: object) -> str:
    """The first line of a message that may have many."""
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _reason(error: Exception) -> str:
    """What went wrong: the first line, and the next where the first only says where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else first_line(error)
    return said if error.__cause__ is None else f"{said}: {first_line(error.__cause__)}"


def _of_type(cause: Exception) -> str:
    kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
    match = re.search(r"could not be converted to (\w+)", str(cause)) or re.search(
        r"is not a valid (bool)", str(cause)
    )
    if match:
        return f"not {kinds.get(match[1], 'true or false' if match[1] == 'bool' else match[1])}"
    if "is not Optional" in str(cause):
        return "must not be null"
    return first_line(cause).replace("Cannot convert", "cannot convert")


def _is_unknown(override: Override, cfg: DictConfig) -> bool:
    if not override.is_delete():
        return False
    return OmegaConf.select(cfg, override.key_or_group, throw_on_resolution_failure=False) is None


def _is_mapping(cfg: DictConfig, key: str) -> bool:
    try:
        return isinstance(OmegaConf.select(cfg, key, throw_on_resolution_failure=False), DictConfig)
    except OmegaConfBaseException:
        return False


def _keys(node: DictConfig, prefix: str = "") -> list[str]:
    found = []
    for key in node:
        if not prefix and key == "hydra":
            continue
        name = f"{prefix}.{key}" if prefix else str(key)
        found.append(name)
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (
            child._is_none() or child._is_missing() or child._is_interpolation()
        ):
            found += _keys(child, name)
    return found

"""Each value that is wrong by itself: a config held against the types of its keys."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from gptrain.config.suggest import find_alias, nearest, nearest_key
from gptrain.core.data_schema import DATA, DataConfig, MixtureConfig
from gptrain.core.errors import ConfigIssue, show
from gptrain.core.schema import SHIPPED, RunConfig
from gptrain.core.shell import command
from gptrain.core.strategies import STRATEGIES, options_type
from gptrain.core.value_types import Section

OF_HYDRA = {"_args_", "_recursive_", "_convert_", "_partial_"}  # in any node with a _target_
CLASS = r"[^\W\d]\w*(\.\w+)+"
SHORTER = {
    "greater than or equal to": ">=",
    "less than or equal to": "<=",
    "greater than": ">",
    "less than": "<",
    "or Input should be": "or",
    "Input should be": "must be",
    "Value error, ": "",
}


def read_config(
    values: dict[str, Any], schema: type[RunConfig] = RunConfig
) -> tuple[RunConfig, list[ConfigIssue]]:
    """Return the typed config and a problem for each value that is wrong by itself.

    If there is a problem, the values that are wrong or missing are None in the returned config, so
    that rules about other keys can still be applied.

    Args:
        values: The config as nested dicts and lists, with all references resolved.
        schema: Type of the config.
    """
    flat = dict(walk(values))
    problems = list(_find_wrong_values(values, flat, schema))
    if problems:
        message = {problem.key for problem in problems}
        return _construct(schema, values, "", flat, message), problems
    typed = dict(values)
    for group, field in schema.model_fields.items():
        base, node = _section_in(field.annotation), values.get(group)
        if base is None or not isinstance(node, dict) or not node:
            continue
        if typing.get_origin(field.annotation) is dict:  # callbacks and loggers, by name
            typed[group] = {
                name: item and _section_type(f"{group}.{name}", base, flat).model_validate(item)
                for name, item in node.items()
            }
        else:
            typed[group] = _section_type(group, base, flat).model_validate(node)
    return schema.model_validate(typed), []


def _find_wrong_values(
    values: dict[str, Any], flat: dict[str, Any], schema: type[RunConfig]
) -> Iterator[ConfigIssue]:
    """Yield a problem for each wrong value, unknown key and missing key.

    A key may be reported twice: by the type of its class and by the type of its group.
    """
    for place, node in flat.items():
        if not isinstance(node, dict):
            continue
        target = show(node.get("_target_", "a.class"))
        if not re.fullmatch(CLASS, target) or target.split(".")[0] in sys.stdlib_module_names:
            message = "not a dotted name of a class outside of Python's own library"
            yield ConfigIssue(f"{place}._target_", target, message)
        elif section := _shipped_section(place, flat):
            own = {key: value for key, value in node.items() if key not in OF_HYDRA}
            yield from _judge(section, own, place, values)
    problems = _judge(schema, values, "", values)
    data = values.get("data")
    if schema.reads_data and isinstance(data, dict) and "_target_" in data:
        message = "nothing reads a class for the whole data group, such as a LightningDataModule"
        hint = "data.train._target_ and data.val._target_, each of a dataset"
        yield ConfigIssue("data._target_", data["_target_"], message, hint=hint)
        missing = {f"data.{name}" for name in DataConfig.model_fields if name not in data}
        problems = (problem for problem in problems if problem.key not in missing)
    yield from problems


def walk(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of all that is nested in a node, itself first."""
    yield place, node
    is_list = isinstance(node, list)
    for key, item in enumerate(node) if is_list else node.items() if isinstance(node, dict) else ():
        yield from walk(item, f"{place}.{key}" if place else str(key))


def targets(values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted key and node of all that has a `_target_`."""
    return (one for one in walk(values) if isinstance(one[1], dict) and "_target_" in one[1])


def unknown_choice(key: str, value: str, names: Iterable[str], group: str) -> ConfigIssue:
    """Return the problem that a value is not among a key's choices, with the most similar one."""
    near = nearest(value, names)
    words = "unknown" + (f', did you mean "{near}"?' if near else "")
    return ConfigIssue(key, value, words, ", ".join(names), f"{group}={near}" if near else "")


def unknown_key(key: str, value: Any, values: dict[str, Any]) -> ConfigIssue:
    """Return the problem that nothing reads a key, with the key that may have been meant."""
    group, _, leaf = key.rpartition(".")
    node = values.get(group) or {}
    siblings = [name for name in node if name != "_target_"] if isinstance(node, dict) else []
    readers = [name for name, row in STRATEGIES.items() if leaf in row.options.model_fields]
    if group == "strategy" and readers:
        message = f"no effect under strategy={node.get('name')}"
        return ConfigIssue(key, value, message, f"under strategy={', '.join(readers)}")
    if alias := find_alias(key, show(value)):
        return ConfigIssue(key, value, "unknown key", hint=alias)
    known = {place for place, value in walk(values) if "." not in place or type(value) is not dict}
    if near := nearest_key(key, known - {key}):
        return ConfigIssue(key, value, f"unknown key, did you mean {near}? (new keys need +)")
    message = f"unknown key of this {group}" if siblings else "unknown key"
    return ConfigIssue(key, value, message, ", ".join(siblings), "" if siblings else "--help")


def _shipped_section(place: str, flat: dict[str, Any]) -> type[Section] | None:
    """Return the type of all keys of a node if the class that reads them ships with gptrain."""
    if place == "strategy":
        return options_type(flat.get("strategy.name"))
    is_part = re.fullmatch(r"data\.parts\.[^.]+", place)
    if place == "data" or (is_part and _shipped_section("data", flat) is MixtureConfig):
        return DATA.get(show(flat.get(f"{place}.train._target_")))
    return SHIPPED.get(show(flat.get(f"{place}._target_")))


def _section_type(place: str, base: type[Section], flat: dict[str, Any]) -> type[Section]:
    """Return the most specific type of the section at a place: `base`, or a subclass of it."""
    shipped = _shipped_section(place, flat)
    return shipped if shipped is not None and issubclass(shipped, base) else base


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the type of section that an annotation of a field contains, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def _construct(
    section: type[Section], node: Any, place: str, flat: dict[str, Any], message: set[str]
) -> Any:
    """Return a section without validation, in which missing and wrong values are None."""
    node, section = node if isinstance(node, dict) else {}, _section_type(place, section, flat)
    made: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        key, kind = field.alias or name, _section_in(field.annotation)
        inner = f"{place}.{key}" if place else key
        value = None if inner in message else node.get(key, field.get_default())
        if kind is None or (kind is not field.annotation and value is None):
            made[key] = None if field.is_required() and key not in node else value
        elif typing.get_origin(field.annotation) is dict:
            named = value if isinstance(value, dict) else {}
            made[key] = {
                name: item and _construct(kind, item, f"{inner}.{name}", flat, message)
                for name, item in named.items()
            }
        else:
            made[key] = _construct(kind, value, inner, flat, message)
    extra = {key: value for key, value in node.items() if key not in made}
    return section.model_construct(**made, **extra)


def _judge(
    model: type[BaseModel], node: dict[str, Any], place: str, values: dict[str, Any]
) -> Iterator[ConfigIssue]:
    """A problem for each key of a node that its model refuses."""
    try:
        model.model_validate(node)
        return
    except ValidationError as error:
        found: dict[str, list] = {}  # of a union each member has an error of its own
        for one in error.errors(include_url=False):
            found.setdefault(_key(node, dict(one)), []).append(one)
    for inner, errors in found.items():
        kind, key = errors[0]["type"], f"{place}.{inner}" if place else inner
        given = dict(walk(node)).get(inner)
        if kind == "extra_forbidden":
            yield unknown_key(key, given, values)
        elif kind == "missing":
            entry, _, leaf = key.rpartition(".")  # of callbacks, that an experiment adds to, say
            hint = command(f"~{entry}") if leaf == "_target_" and "." in entry else ""
            yield ConfigIssue(key, None, "missing, the run needs it", hint=hint)
        elif kind == "literal_error" and len(errors) == 1:
            names = re.findall(r"'([^']*)'", errors[0]["ctx"]["expected"])
            yield unknown_choice(key, show(given), names, key)
        else:
            field = model.model_fields.get(inner)
            words = " or ".join(dict.fromkeys(one["msg"] for one in errors))
            if kind in ("model_type", "dict_type"):
                words = "not a group of keys"
            if field and field.description:
                words = f"must be {field.description}"
            for long, short in SHORTER.items():
                words = words.replace(long, short)
            yield ConfigIssue(key, show(given), words)


def _key(node: Any, error: dict[str, Any]) -> str:
    """The dotted key of a pydantic error, whose place names members of unions besides keys."""
    keys = []
    for part in error["loc"]:
        if not isinstance(node, dict) or (part not in node and error["type"] != "missing"):
            break
        keys.append(str(part))
        node = node.get(part)
    return ".".join(keys)

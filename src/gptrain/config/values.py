"""Validates each value of a config against the type of its key, and returns the typed config.

Rules about several values are in `gptrain.config.check`.
"""

import re
import sys
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from gptrain.config.suggest import find_alias, nearest, nearest_key
from gptrain.core.data_schema import DATA, DataModuleConfig, MixtureConfig
from gptrain.core.errors import ConfigIssue, show
from gptrain.core.schema import SHIPPED, RunConfig
from gptrain.core.shell import command
from gptrain.core.strategies import STRATEGIES, StrategyOptions, find_strategy
from gptrain.core.value_types import Section

# Keys of Hydra that any node with a _target_ may have.
HYDRA_KEYS = {"_args_", "_recursive_", "_convert_", "_partial_"}
DOTTED_NAME = r"[^\W\d]\w*(\.\w+)+"
# Phrases of pydantic's messages, and what is printed instead.
PHRASES = {
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
    """Validate each value of a config, and return the typed config and the problems.

    Args:
        values: Config as nested dicts and lists, with all references resolved.
        schema: Type of the config.

    Returns:
        The typed config, and a problem for each invalid value, missing key and unknown key. If
        there are problems, invalid and missing values are None in the typed config, so that rules
        about other keys can still be applied.
    """
    flat = dict(walk(values))
    problems = list(_find_wrong_values(values, flat, schema))
    if problems:
        wrong_keys = {problem.key for problem in problems}
        return _construct(schema, values, "", flat, wrong_keys), problems
    typed = dict(values)
    for group, field in schema.model_fields.items():
        base, node = _section_in(field.annotation), values.get(group)
        if base is None or not isinstance(node, dict) or not node:
            continue
        if typing.get_origin(field.annotation) is dict:  # callbacks and loggers have a name each
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
    """Yield a problem for each invalid value, unknown key and missing key.

    A key may be reported twice: by the type of its class, such as AdamWConfig, and by the type of
    its group, such as OptimizerConfig.

    Args:
        values: Config as nested dicts and lists.
        flat: Value of each dotted key of the config.
        schema: Type of the config.
    """
    for place, node in flat.items():
        if not isinstance(node, dict):
            continue
        target = show(node.get("_target_", "a.class"))
        if not re.fullmatch(DOTTED_NAME, target) or target.split(".")[0] in sys.stdlib_module_names:
            message = "not the dotted name of a class outside of Python's standard library"
            yield ConfigIssue(f"{place}._target_", target, message)
        elif section := _shipped_section(place, flat):
            own = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
            yield from _judge(section, own, place, values)
    problems = _judge(schema, values, "", values)
    if "data._target_" in flat:  # the loop has judged the group as a DataModuleConfig
        problems = (problem for problem in problems if not problem.key.startswith("data."))
    yield from problems


def walk(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of a node and of everything inside it, in depth-first order.

    Args:
        node: Nested dicts and lists. An item of a list has its index as the last part of its key.
        place: Dotted key of the node itself.
    """
    yield place, node
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    for key, item in items:
        yield from walk(item, f"{place}.{key}" if place else str(key))


def check_references(values: Any) -> Iterator[ConfigIssue]:
    """Yield a problem for each key that refers to `ckpt_path`.

    The run replaces `last` and `best` by the checkpoint that it finds, after references were
    resolved. A key that refers to `ckpt_path` would keep the typed word.

    Args:
        values: Config as nested dicts and lists, in which references are not resolved.
    """
    for key, value in walk(values):
        if isinstance(value, str) and re.search(r"\$\{\s*ckpt_path\s*\}", value):
            message = "the run replaces ckpt_path by the checkpoint that it finds after its start"
            hint = "trainer.ckpt_path in a hook of the class: that checkpoint, or None"
            yield ConfigIssue(key, value, message, hint=hint)


def targets(values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield dotted key and node of every node that has a `_target_`, in depth-first order.

    Args:
        values: Config as nested dicts and lists.
    """
    for place, node in walk(values):
        if isinstance(node, dict) and "_target_" in node:
            yield place, node


def unknown_choice(key: str, value: str, names: Iterable[str], group: str) -> ConfigIssue:
    """Return the problem of a value that is not among the choices of its key.

    Args:
        key: Dotted key.
        value: Value that is not a choice.
        names: Choices. The message suggests the most similar one.
        group: Key to which the suggested choice is assigned.
    """
    near = nearest(value, names)
    message = "unknown" + (f', did you mean "{near}"?' if near else "")
    return ConfigIssue(key, value, message, ", ".join(names), f"{group}={near}" if near else "")


def unknown_key(key: str, value: Any, values: dict[str, Any]) -> ConfigIssue:
    """Return the problem of a key that nothing reads, and what to type instead, if that is known.

    An option of another strategy names the strategies that have it. An option of another project
    gets gptrain's override, and a misspelt key the most similar known key. For any other key the
    known keys of its group are listed, if the group exists.

    Args:
        key: Unknown dotted key.
        value: Value that was given to the key.
        values: Config as nested dicts.
    """
    group, _, leaf = key.rpartition(".")
    node = values.get(group) or {}
    siblings = [name for name in node if name != "_target_"] if isinstance(node, dict) else []
    readers = [name for name, row in STRATEGIES.items() if leaf in row.model_fields]
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
    """Return the type that knows all keys of the node at a place, or None.

    There is such a type if the class in the node's `_target_` is listed in SHIPPED, the data group
    is listed in DATA, or the node is the strategy group.

    Args:
        place: Dotted key of the node.
        flat: Value of each dotted key of the config.
    """
    if place == "strategy":
        return find_strategy(flat.get("strategy.name")) or StrategyOptions
    is_part = re.fullmatch(r"data\.parts\.[^.]+", place)
    if place == "data" and "data._target_" in flat:
        return DataModuleConfig
    if place == "data" or (is_part and _shipped_section("data", flat) is MixtureConfig):
        return DATA.get(show(flat.get(f"{place}.train._target_")))
    return SHIPPED.get(show(flat.get(f"{place}._target_")))


def _section_type(place: str, base: type[Section], flat: dict[str, Any]) -> type[Section]:
    """Return the type of the section at a place: `base`, or its subclass for a class of gptrain.

    The subclass has the options of one class of gptrain. The config names this class in the
    section's `_target_`. A strategy is named by `strategy.name` instead, and the data group by
    `data.train._target_` (see `_shipped_section`). The type is `base` for a class of the user.

    Args:
        place: Dotted key of the section.
        base: Type of the section's group.
        flat: Value of each dotted key of the config.
    """
    shipped = _shipped_section(place, flat)
    return shipped if shipped is not None and issubclass(shipped, base) else base


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the section type in the annotation of a field, such as X in `dict[str, X | None]`.

    Returns None if the annotation contains no section type.

    Args:
        annotation: Type annotation of a field of pydantic.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def _construct(
    section: type[Section], node: Any, place: str, flat: dict[str, Any], wrong_keys: set[str]
) -> Any:
    """Return a section of a config that has errors, with None for missing and invalid values.

    Nothing is validated. Rules about the valid keys can then still be applied to the section.

    Args:
        section: Type of the section, or a base class of it.
        node: Values of the section. Anything but a dict counts as an empty section.
        place: Dotted key of the section, empty for the whole config.
        flat: Value of each dotted key of the whole config.
        wrong_keys: Dotted keys with invalid values.
    """
    if not isinstance(node, dict):
        node = {}
    section = _section_type(place, section, flat)
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        key = field.alias or name
        inner = f"{place}.{key}" if place else key
        inner_section = _section_in(field.annotation)
        value = None if inner in wrong_keys else node.get(key, field.get_default())
        is_optional = inner_section is not field.annotation
        if inner_section is None or (is_optional and value is None):
            fields[key] = None if field.is_required() and key not in node else value
        elif typing.get_origin(field.annotation) is dict:
            items = value if isinstance(value, dict) else {}
            fields[key] = {
                name: item and _construct(inner_section, item, f"{inner}.{name}", flat, wrong_keys)
                for name, item in items.items()
            }
        else:
            fields[key] = _construct(inner_section, value, inner, flat, wrong_keys)
    extra = {key: value for key, value in node.items() if key not in fields}
    return section.model_construct(**fields, **extra)


def _judge(
    model: type[BaseModel], node: dict[str, Any], place: str, values: dict[str, Any]
) -> Iterator[ConfigIssue]:
    """Validate a node by a type of pydantic, and yield one problem for each key that is refused.

    Args:
        model: Type of the node.
        node: Values of the node.
        place: Dotted key of the node, empty for the whole config.
        values: Whole config as nested dicts, from which similar keys are suggested.
    """
    try:
        model.model_validate(node)
        return
    except ValidationError as error:
        errors_by_key: dict[str, list] = {}  # each member of a union reports an error for its key
        for details in error.errors(include_url=False):
            errors_by_key.setdefault(_key(node, dict(details)), []).append(details)
    for inner, errors in errors_by_key.items():
        kind = errors[0]["type"]
        key = f"{place}.{inner}" if place else inner
        given = dict(walk(node)).get(inner)
        if kind == "extra_forbidden":
            yield unknown_key(key, given, values)
        elif kind == "missing":
            # A callback or logger without a class often is a leftover of an override: remove it.
            entry, _, leaf = key.rpartition(".")
            hint = command(f"~{entry}") if leaf == "_target_" and "." in entry else ""
            yield ConfigIssue(key, None, "missing, but required", hint=hint)
        elif kind == "literal_error" and len(errors) == 1:
            names = re.findall(r"'([^']*)'", errors[0]["ctx"]["expected"])
            yield unknown_choice(key, show(given), names, key)
        else:
            field = model.model_fields.get(inner)
            message = " or ".join(dict.fromkeys(details["msg"] for details in errors))
            if kind in ("model_type", "dict_type"):
                message = "not a group of keys"
            if field and field.description:
                message = f"must be {field.description}"
            for phrase, replacement in PHRASES.items():
                message = message.replace(phrase, replacement)
            yield ConfigIssue(key, show(given), message)


def _key(node: Any, error: dict[str, Any]) -> str:
    """Return the dotted key of a pydantic error, relative to the node.

    The `loc` of the error contains keys, followed by names of members of a union. The latter are
    left out.

    Args:
        node: Validated values, as nested dicts.
        error: Details of the error: one item of `ValidationError.errors()`.
    """
    keys = []
    for part in error["loc"]:
        if not isinstance(node, dict) or (part not in node and error["type"] != "missing"):
            break
        keys.append(str(part))
        node = node.get(part)
    return ".".join(keys)

"""Each value that is wrong by itself: a config held against the types of its keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from gptrain.config.data_schema import DATA, Mixture
from gptrain.config.kinds import Closed
from gptrain.config.schema import KNOWN, STRATEGIES, Run
from gptrain.config.suggest import find_alias, nearest, nearest_key
from gptrain.problems import Problem, show
from gptrain.shell import command

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


def find_wrong_values(values: dict[str, Any], schema: type[Run] = Run) -> Iterator[Problem]:
    """Each value that is wrong by itself, each key that nothing reads or that is missing.

    A key may be told twice, in the words of its class and in those of its group.
    """
    flat = dict(walk(values))
    for place, node in flat.items():
        if not isinstance(node, dict):
            continue
        target = show(node.get("_target_", "a.class"))
        if not re.fullmatch(CLASS, target) or target.split(".")[0] in sys.stdlib_module_names:
            wrong = "not a dotted name of a class outside of Python's own library"
            yield Problem(f"{place}._target_", target, wrong)
        elif model := _model_of(place, flat):
            own = {key: value for key, value in node.items() if key not in OF_HYDRA}
            yield from _judge(model, own, place, values)
    yield from _judge(schema, values, "", values)


def walk(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of all that is nested in a node, itself first."""
    yield place, node
    is_list = isinstance(node, list)
    for key, item in enumerate(node) if is_list else node.items() if isinstance(node, dict) else ():
        yield from walk(item, f"{place}.{key}" if place else str(key))


def targets(values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted key and node of all that has a `_target_`."""
    return (one for one in walk(values) if isinstance(one[1], dict) and "_target_" in one[1])


def unknown_choice(key: str, value: str, names: Iterable[str], group: str) -> Problem:
    """A word that is none of a key's choices, with the one that may have been meant."""
    near = nearest(value, names)
    words = "unknown" + (f', did you mean "{near}"?' if near else "")
    attempt = find_alias(key, value) or (f"{group}={near}" if near else "")
    return Problem(key, value, words, ", ".join(names), attempt)


def unknown_key(key: str, value: Any, values: dict[str, Any]) -> Problem:
    """A key that nothing reads, with the one that may have been meant."""
    group, _, leaf = key.rpartition(".")
    node = values.get(group) or {}
    siblings = [name for name in node if name != "_target_"] if isinstance(node, dict) else []
    readers = [name for name, model in STRATEGIES.items() if leaf in model.model_fields]
    if group == "strategy" and readers:
        wrong = f"no effect under strategy={node.get('name')}"
        return Problem(key, value, wrong, f"under strategy={', '.join(readers)}")
    if alias := find_alias(key, show(value)):
        return Problem(key, value, "unknown key", attempt=alias)
    known = {place for place, value in walk(values) if "." not in place or type(value) is not dict}
    if near := nearest_key(key, known - {key}):
        return Problem(key, value, f"unknown key, did you mean {near}? (new keys need +)")
    wrong = f"unknown key of this {group}" if siblings else "unknown key"
    return Problem(key, value, wrong, ", ".join(siblings), "" if siblings else "--help")


def _model_of(place: str, flat: dict[str, Any]) -> type[Closed] | None:
    """The type of all keys of a group, where the class that reads them ships."""
    if place == "strategy":
        return STRATEGIES.get(show(flat.get("strategy.name")))
    is_part = re.fullmatch(r"data\.parts\.[^.]+", place) and _model_of("data", flat) is Mixture
    if place == "data" or is_part:
        return DATA.get(show(flat.get(f"{place}.train._target_")))
    return KNOWN.get(show(flat.get(f"{place}._target_")))


def _judge(
    model: type[BaseModel], node: dict[str, Any], place: str, values: dict[str, Any]
) -> Iterator[Problem]:
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
            attempt = command(f"~{entry}") if leaf == "_target_" and "." in entry else ""
            yield Problem(key, None, "missing, the run needs it", attempt=attempt)
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
            yield Problem(key, show(given), words, attempt=find_alias(key, show(given)) or "")


def _key(node: Any, error: dict[str, Any]) -> str:
    """The dotted key of a pydantic error, whose place names members of unions besides keys."""
    keys = []
    for part in error["loc"]:
        if not isinstance(node, dict) or (part not in node and error["type"] != "missing"):
            break
        keys.append(str(part))
        node = node.get(part)
    return ".".join(keys)

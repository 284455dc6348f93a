"""Each value that is wrong by itself: a config held against the types of its keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from gptrain.config.schema import (
    DATA,
    GROUPS,
    KNOWN,
    STRATEGIES,
    AdamW,
    Checkpoint,
    Data,
    Launcher,
    Muon,
    Run,
    SimpleGPT,
    Strategy,
)
from gptrain.config.suggest import find_alias, nearest, nearest_key
from gptrain.problems import Problem, show

OF_HYDRA = {"_target_", "_args_", "_recursive_", "_convert_", "_partial_"}  # in any node


def find_wrong_values(values: dict[str, Any], schema: type[Run] = Run) -> Iterator[Problem]:
    """Each value that is wrong by itself, each key that nothing reads or that is missing."""
    yield from _judge(schema, values, "", values)
    data, strategy = values.get("data"), values.get("strategy")
    if isinstance(data, dict):
        yield from _judge(data_model(values), data, "data", values)
    if isinstance(strategy, dict):
        model = STRATEGIES.get(str(strategy.get("name")), Strategy)
        yield from _judge(model, strategy, "strategy", values)
    for place, node in targets(values):
        target = node["_target_"]
        if not isinstance(target, str) or not re.fullmatch(r"[^\W\d]\w*(\.\w+)+", target):
            yield Problem(f"{place}._target_", show(target), "not a dotted name of a class")
            continue
        if target.split(".")[0] in sys.stdlib_module_names:
            wrong = "of Python's own library, none of whose classes fits here"
            yield Problem(f"{place}._target_", target, wrong)
            continue
        model, base = KNOWN.get(target), GROUPS.get(place)
        if base and not (model and issubclass(model, base)):
            model = base
        own = {key: value for key, value in node.items() if key not in OF_HYDRA}
        if model:
            yield from _judge(model, own, place, values)


def data_model(values: dict[str, Any]) -> type[Data]:
    """The model of a data group, by the class of its training set."""
    train = values["data"].get("train")
    return DATA.get(str(train.get("_target_")) if isinstance(train, dict) else "", Data)


def targets(node: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted key and node of all that has a `_target_`."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from targets(item, f"{place}[{index}]")
    if isinstance(node, dict):
        if "_target_" in node:
            yield place, node
        for key, item in node.items():
            yield from targets(item, f"{place}.{key}" if place else str(key))


def unknown_key(key: str, value: Any, values: dict[str, Any]) -> Problem:
    """A key that nothing reads, with the one that may have been meant."""
    group, _, leaf = key.rpartition(".")
    node = values.get(group)
    siblings = [name for name in node if name != "_target_"] if isinstance(node, dict) else []
    readers = [name for name, model in STRATEGIES.items() if leaf in model.model_fields]
    if group == "strategy" and readers:
        wrong = f"no effect under strategy={node.get('name')}"
        attempt = f"strategy={readers[0]}, or leave {leaf} out"
        return Problem(key, value, wrong, f"under strategy={', '.join(readers)}", attempt)
    if alias := find_alias(key, show(value)):
        return Problem(key, value, "unknown key", attempt=alias)
    known = known_keys()
    near = nearest_key(key, known | {f"{group}.{name}" for name in siblings} - {key})
    if near is None or key in known:
        allowed, attempt = ", ".join(siblings), "" if siblings else "--help"
        return Problem(
            key, value, f"unknown key{f' of this {group}' * bool(group)}", allowed, attempt
        )
    return Problem(key, value, f"unknown key, did you mean {near}? (new keys need +)")


def known_keys() -> set[str]:
    """Dotted keys of the run and of the groups' classes that ship."""
    places = [("", Run), ("data", Data), ("checkpoint", Checkpoint), ("launcher", Launcher)]
    places += [*GROUPS.items(), ("model", SimpleGPT), ("optimizer", Muon), ("optimizer", AdamW)]
    places += [("strategy", model) for model in STRATEGIES.values()]
    places += [("data", model) for model in DATA.values()]
    return {f"{place}.{key}".lstrip(".") for place, model in places for key in model.model_fields}


def _judge(
    model: type[BaseModel], node: dict[str, Any], place: str, values: dict[str, Any]
) -> Iterator[Problem]:
    try:
        model.model_validate(node)
        return
    except ValidationError as error:
        found = error.errors(include_url=False)
    told = set()  # each member of a union has an error of its own
    for one in found:
        (key, given), kind = _find(place, node, one["loc"], one["type"]), one["type"]
        if key in told:
            continue
        told.add(key)
        if kind == "extra_forbidden":
            yield unknown_key(key, given, values)
            continue
        words, known = one["msg"].replace("Input should be", "must be"), []
        if kind == "model_type":
            words = "not a group of keys"
        if kind == "missing":
            words = "missing, the run needs it"
        if kind == "literal_error":
            known = re.findall(r"'([^']*)'", one["ctx"]["expected"])
            near = nearest(str(given), known)
            words = "unknown" + (f', did you mean "{near}"?' if near else "")
        value = None if kind == "missing" else show(given)
        attempt = find_alias(key, show(given)) or ""
        yield Problem(key, value, words, ", ".join(known), attempt)


def _find(place: str, node: Any, loc: tuple, kind: str) -> tuple[str, Any]:
    """Dotted key and value of pydantic's place, which names members of unions besides keys."""
    keys = [place] if place else []
    for part in loc:
        if not isinstance(node, dict) or (part not in node and kind != "missing"):
            break
        keys.append(str(part))
        node = node.get(part)
    return ".".join(keys), node

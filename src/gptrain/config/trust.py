"""What may be taken from somebody else's run folder.

One's own yaml is code, and is not judged here. A config that lies in a run folder (from_run,
gptrain.load, export, init_from) is data: a `_target_` in it may only name a class of the kind that
its group holds, which comes from this checkout, torch or Lightning, or from a package that the user
allows now; and its values must be plain, or plain references to one another.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gptrain.config.compose import PROJECT, REFUSALS, default_output_dir, first_line
from gptrain.config.schema import targets
from gptrain.config.suggest import nearest
from gptrain.problems import ConfigError, Problem, show

LIBRARIES = ("torch", "lightning", "pytorch_lightning")
# Group -> base class that its objects have; of a dataset what it can do is looked at.
KINDS = {
    "model": "torch.nn.Module",
    "module": "lightning.pytorch.LightningModule",
    "optimizer": "torch.optim.Optimizer",
    "scheduler": "torch.optim.lr_scheduler.LRScheduler",
    "trainer": "lightning.pytorch.Trainer",
    "callbacks": "lightning.pytorch.Callback",
    "logger": "lightning.pytorch.loggers.Logger",
    "profiler": "lightning.pytorch.profilers.Profiler",
    "metrics": "torchmetrics.Metric",
}
REFERENCE = r"\$\{(\w[\w.]*)\}"
OURS = rf"{REFERENCE}|\$\{{(?:plus|run_stamp|default_output_dir):"  # or a resolver of ours
MAX_CHARACTERS = 10**6  # of a resolved config; references can double a value again and again


class NotFound(Exception):
    """Why a dotted name stands for nothing."""


def check_targets(node: dict[str, Any], group: str, allowed: Sequence[str] = ()) -> list[Problem]:
    """What a stranger's group may not name, arguments included. Imports only trusted packages.

    Args:
        node: plain values.   group: where they stand: model, data, optimizer, ...
        allowed: packages that the user trusts.
    """
    problems = []
    for place, found in targets(node, group):
        key, target = f"{place}._target_", found["_target_"]
        kind = "metrics" if place.startswith("module.metrics.") else group
        if reason := _reason(target, kind, allowed):
            attempt = f"allowed_targets=[{str(target).split('.')[0]}], if you trust its code"
            problems.append(Problem(key, show(target), reason, attempt=attempt))
    return problems


def plain(cfg: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """The values of a stranger's config, resolved once. Objects are built from exactly these.

    Raises: ConfigError where a value would run a resolver, or does not end in a plain one.
    """
    raw = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else cfg
    for key, text in _texts(raw):
        if not is_plain(text):
            wrong = "of somebody else's run only plain references are resolved"
            raise ConfigError([Problem(key, show(text), wrong)])
    if count_characters(raw) > MAX_CHARACTERS:
        raise ConfigError([Problem("", None, "its references make it larger than a config is")])
    try:
        values = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
    except REFUSALS as error:
        raise ConfigError([Problem("", None, first_line(error))]) from None
    for key, text in _texts(values):
        if "${" in text:
            raise ConfigError([Problem(key, show(text), "does not resolve to a plain value")])
    return values


def is_plain(text: str) -> bool:
    """Whether all that a text refers to are other keys, or resolvers of ours."""
    return text.count("${") == len(re.findall(OURS, text))


def count_characters(raw: dict[str, Any]) -> int:
    """Length of all texts once references are resolved, without resolving them."""
    known: dict[str, int] = {}

    def count(value: Any) -> int:
        if isinstance(value, dict | list):
            return sum(map(count, value.values() if isinstance(value, dict) else value))
        return len(str(value)) + sum(map(look, re.findall(REFERENCE, str(value))))

    def look(key: str) -> int:
        if key not in known:
            known[key], node = 0, raw  # 0 to a reference back here, which OmegaConf refuses
            for part in key.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            known[key] = count(node)
        return known[key]

    return count(raw)


def locate(target: str) -> Any:
    """What a dotted name stands for. Raises: NotFound."""
    parts, found = target.split("."), None
    for depth in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:depth])
        try:
            found = import_module(name)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise NotFound(f"needs the package {error.name}, not installed") from error
        except Exception as error:  # whatever a user's module raises is a line, not a traceback
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise NotFound(f"{name} cannot be imported: {reason}") from error
    if found is None:
        raise NotFound(f"no module named {parts[0]}")
    for i in range(depth, len(parts)):
        owner, found = found, getattr(found, parts[i], None)
        if found is None:
            near = nearest(parts[i], [name for name in dir(owner) if name[0] != "_"])
            meant = f", did you mean {'.'.join([*parts[:i], near])}?" if near else ""
            raise NotFound(f"nothing of that name in {'.'.join(parts[:i])}{meant}")
    if not callable(found):
        raise NotFound("neither a class nor a function")
    return found


def wrong_kind(found: Any, group: str) -> str | None:
    """Why an object is not what a group holds; None where it is."""
    owner = found.__self__ if inspect.ismethod(found) else found
    if group == "data":
        is_set = inspect.isclass(owner) and hasattr(owner, "__getitem__")
        return None if is_set else "no dataset, as this place needs"
    if group == "scheduler" and inspect.isfunction(found):
        return None  # of the step
    kind = KINDS.get(group)
    if kind is None or (inspect.isclass(owner) and issubclass(owner, locate(kind))):
        return None
    return f"no {kind.rpartition('.')[2]}, as this place needs"


def is_own(package: str) -> bool:
    """Whether a top-level package is code of this checkout, not its outputs or its libraries."""
    try:
        spec = None if package in sys.stdlib_module_names else find_spec(package)
    except (ImportError, ValueError):
        return False
    found = [*(spec.submodule_search_locations or []), spec.origin] if spec else []
    places = [Path(place).resolve() for place in found if place]
    outputs = (PROJECT / "outputs", Path(default_output_dir()).resolve())
    return bool(places) and all(
        place.is_relative_to(PROJECT)
        and not any(place.is_relative_to(folder) for folder in outputs)
        and not re.search(r"/(\.|site-packages/)", str(place)[len(str(PROJECT)) :])
        for place in places
    )


def _reason(target: Any, group: str, allowed: Sequence[str]) -> str | None:
    if not isinstance(target, str) or not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", target):
        return "not the name of a class"
    if not _is_trusted(target, group, allowed):
        return "somebody else's run may not name it"
    try:
        found = locate(target)
    except NotFound as error:
        return str(error)
    owner = found.__self__ if inspect.ismethod(found) else found
    home = getattr(owner, "__module__", None) or ""
    if not _is_trusted(home, group, allowed):
        return f"stands for {home}.{getattr(found, '__qualname__', '')}, which it may not name"
    is_listed = home.split(".")[0] in allowed
    if inspect.isfunction(found) and not (home.startswith("gptrain.optim.") or is_listed):
        return "a function, not a class"
    if inspect.ismethod(found) and not (group == "data" and found.__name__.startswith("from_")):
        return "not a class"
    return wrong_kind(found, group)


def _is_trusted(name: str, group: str, allowed: Sequence[str]) -> bool:
    package = name.split(".")[0]
    known = (*LIBRARIES, *allowed, *(["torchmetrics"] if group == "metrics" else []))
    return package in known or is_own(package)


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a nested value, names of keys included."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield key, str(name)
            yield from _texts(value, f"{key}.{name}".lstrip("."))

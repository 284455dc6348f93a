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

from gptrain.config.compose import PROJECT, REFUSALS, default_output_dir
from gptrain.config.suggest import nearest
from gptrain.config.values import targets
from gptrain.problems import ConfigError, Problem, first_line, show

LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics")
# Of these the modules whose classes neither fetch nor open what their arguments name.
HOMES = (
    r"torch\.(nn|optim|utils\.data\.dataset)|(lightning\.pytorch|pytorch_lightning)(?!\.demos)"
    r"|torchmetrics\.(aggregation|classification|regression|text\.perplexity)"
)
WRITTEN = {"cache_dir", "default_root_dir", "dirpath", "save_dir"}  # keys that say where to write
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
REFERENCE = r"\$\{([\w.]+)\}"
OURS = r"\$\{(?:[\w.]+\}|(?:plus|run_stamp|default_output_dir):)"  # plain, or a resolver of ours
LONGEST = 10_000  # characters of a value; references can double it again and again


class NotFound(Exception):
    """Why a dotted name stands for nothing."""


def check_targets(
    node: dict[str, Any], group: str, allowed: Sequence[str] = (), run_dir: Path | None = None
) -> list[Problem]:
    """What a stranger's group may not name, arguments included. Imports only trusted packages.

    Args:
        node: plain values.   group: where they stand: model, data, optimizer, ...
        allowed: packages that the user trusts.   run_dir: the stranger's, whose code is not ours.
    """
    problems = []
    for place, found in targets(node, group):
        key, target = f"{place}._target_", found["_target_"]
        for name in sorted(WRITTEN & found.keys()):
            wrong = "where to write is not taken from somebody else's run"
            problems.append(Problem(f"{place}.{name}", show(found[name]), wrong))
        kind = "metrics" if place.startswith("module.metrics.") else group
        if reason := _reason(target, kind, allowed, run_dir):
            attempt = f"allowed_targets=[{str(target).split('.')[0]}], if you trust its code"
            problems.append(Problem(key, show(target), reason, attempt=attempt))
    return problems


def plain(cfg: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """The values of a stranger's config, resolved once. Objects are built from exactly these.

    Raises: ConfigError where a value would run a resolver, or does not end in a plain one.
    """
    raw = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else cfg
    try:
        if problems := check_references(raw):
            raise ConfigError(problems)
        return OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
    except REFUSALS as error:
        raise ConfigError([Problem("", None, first_line(error))]) from None


def check_references(raw: dict[str, Any]) -> list[Problem]:
    """The first value of a stranger's that would run a resolver, or that references multiply."""
    sizes: dict[str, int] = {}  # of a key, all that it refers to put in

    def size(key: str) -> int:
        if key not in sizes:
            sizes[key] = LONGEST  # of what refers to itself
            sizes[key] = sum(size_of(*found) for found in _texts(_select(raw, key), key))
        return sizes[key]

    def size_of(place: str, text: str) -> int:
        return len(text) + sum(size(_absolute(key, place)) for key in re.findall(REFERENCE, text))

    for place, text in _texts(raw):
        if not is_plain(text):
            wrong = "of somebody else's run only plain references are resolved"
            return [Problem(place, show(text), wrong)]
        if size_of(place, text) > LONGEST:
            return [Problem(place, show(text), "does not resolve to a plain value")]
    return []


def is_plain(text: str) -> bool:
    """Whether all that a text refers to are other keys, or resolvers of ours."""
    return text.count("${") == len(re.findall(OURS, text))


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


def is_own(package: str, run_dir: Path | None = None) -> bool:
    """Whether a top-level package is code of this checkout, not its outputs or its libraries.

    Args:
        run_dir: a stranger's run, which may lie in the checkout: code around or in it is not ours.
    """
    try:
        spec = None if package in sys.stdlib_module_names else find_spec(package)
    except (ImportError, ValueError):
        return False
    found = [*(spec.submodule_search_locations or []), spec.origin] if spec else []
    places = [Path(place).resolve() for place in found if place]
    outputs = [PROJECT / "outputs", Path(default_output_dir()).resolve()]
    theirs = [] if run_dir is None else [Path(run_dir).expanduser().resolve()]
    return bool(places) and all(
        place.is_relative_to(PROJECT)
        and not any(place.is_relative_to(folder) for folder in outputs + theirs)
        and not any(folder.is_relative_to(place) for folder in theirs)
        and not re.search(r"/(\.|site-packages/)", str(place)[len(str(PROJECT)) :])
        for place in places
    )


def _reason(target: Any, group: str, allowed: Sequence[str], run_dir: Path | None) -> str | None:
    if not isinstance(target, str) or not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", target):
        return "not the name of a class"
    if not _is_trusted(target, allowed, run_dir):
        return "somebody else's run may not name it"
    try:
        found = locate(target)
    except NotFound as error:
        return str(error)
    owner = found.__self__ if inspect.ismethod(found) else found
    home = getattr(owner, "__module__", None) or ""
    is_listed = any(home == one or home.startswith(f"{one}.") for one in allowed)
    of_library = home.split(".")[0] in LIBRARIES and not is_listed
    if not _is_trusted(home, allowed, run_dir) or (of_library and not re.match(HOMES, home)):
        return f"stands for {home}.{getattr(found, '__qualname__', '')}, which it may not name"
    if inspect.isfunction(found) and not (home.startswith("gptrain.optim.") or is_listed):
        return "a function, not a class"
    if inspect.ismethod(found) and not (group == "data" and found.__name__.startswith("from_")):
        return "not a class"
    return wrong_kind(found, group)


def _is_trusted(name: str, allowed: Sequence[str], run_dir: Path | None) -> bool:
    package = name.split(".")[0]
    listed = any(name == one or name.startswith(f"{one}.") for one in allowed)
    return package in LIBRARIES or listed or is_own(package, run_dir)


def _absolute(key: str, place: str) -> str:
    """A reference as a key of the whole config; one that begins with dots counts from its place."""
    n_dots = len(key) - len(key.lstrip("."))
    return ".".join([*place.split(".")[:-n_dots], key.lstrip(".")]) if n_dots else key


def _select(raw: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a nested value, names of keys included."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield key, str(name)
            yield from _texts(value, f"{key}.{name}".lstrip("."))

"""What may be taken from somebody else's run folder.

One's own yaml is code, and is not judged here. What lies in a run folder (from_run, gptrain.load,
export, init_from) is data: a `_target_` in it may only name a class of the kind that its group
holds, which comes from this project, torch or Lightning, or from a package that the user allows
now; it says nowhere where to write; and its values are plain, or refer to one other key each.
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

from gptrain.config.suggest import nearest
from gptrain.config.values import walk
from gptrain.home import default_output_dir, find_project
from gptrain.problems import Problem, first_line, show

LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics")
# Of these the modules whose classes neither fetch nor open what their arguments name.
HOMES = (
    r"torch\.(nn|optim|utils\.data\.dataset)|(lightning\.pytorch|pytorch_lightning)(?!\.demos)"
    r"|torchmetrics\.(aggregation|classification|regression|text\.perplexity)"
)
# Where to write. A file's name may lead elsewhere, too: ModelCheckpoint joins it to a folder after
# it has put in numbers, of which "{step:c}" makes any character.
WRITTEN = {
    "cache_dir", "default_root_dir", "dirpath", "exclude_batches_path", "mirror", "save_dir",
}  # fmt: skip
FILE_NAME = r"[\w={}-]*"
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
# Of several references, or of one beside a brace, a text could be made that is a reference again,
# to a resolver that makes objects. Nodes that refer to nodes double with each level.
PLAIN = r"[^$]*|[^${]*\$\{\.*\w[\w.]*\}[^${]*"
MOST_REFERENCES = 12


class NotFound(Exception):
    """Why a dotted name stands for nothing."""


def check(
    values: dict[str, Any],
    own: dict[str, Any] | None = None,
    allowed: Sequence[str] = (),
    run_dir: Path | None = None,
) -> Iterator[Problem]:
    """What somebody else's values may not say. Imports only trusted packages.

    Args:
        values: groups by name, nothing resolved.   own: what of them one's own conf/ says.
        allowed: packages that the user trusts.   run_dir: the stranger's, whose code is not ours.
    """
    known, n_references = dict(walk(own or {})), 0
    for place, value in walk(values):
        if place in known and known[place] == value:
            continue
        group, key = place.partition(".")[0], place.rpartition(".")[2]
        if key == "_target_":
            kind = "metrics" if place.startswith("module.metrics.") else group
            if reason := _reason(value, kind, allowed, run_dir):
                attempt = f"allowed_targets=[{show(value).split('.')[0]}], if you trust its code"
                yield Problem(place, show(value), reason, attempt=attempt)
        elif key in WRITTEN or (key == "filename" and not re.fullmatch(FILE_NAME, str(value))):
            wrong = "where to write is not taken from somebody else's run"
            yield Problem(place, show(value), wrong)
        elif isinstance(value, str):
            n_references += "${" in value
            if not re.fullmatch(PLAIN, value, re.DOTALL) or n_references > MOST_REFERENCES:
                wrong = "of somebody else's run only a few plain references are resolved"
                yield Problem(place, value, wrong)


def locate(target: str) -> Any:
    """What a dotted name stands for. Raises: NotFound."""
    parts, found = target.split("."), None
    for depth in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:depth])
        try:
            found = import_module(name)
            break
        except Exception as error:  # whatever a user's module raises is a line, not a traceback
            is_shorter = isinstance(error, ModuleNotFoundError) and error.name is not None
            if not is_shorter or not f"{name}.".startswith(f"{error.name}."):
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise NotFound(f"{name} cannot be imported: {reason}") from error
    if found is None:
        raise NotFound(f"no module named {parts[0]}")
    for i in range(depth, len(parts)):
        owner, found = found, getattr(found, parts[i], None)
        if found is None:
            near = nearest(parts[i], [name for name in dir(owner) if name[0] != "_"])
            meant = f", did you mean {near}?" if near else ""
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
    """Whether a top-level package is this library or code of the project, not of its outputs.

    Args:
        run_dir: a stranger's run, which may lie in the project: code around or in it is not ours.
    """
    project = find_project()
    if package == "gptrain" or project is None:
        return package == "gptrain"
    project = project.resolve()
    try:
        spec = None if package in sys.stdlib_module_names else find_spec(package)
    except (ImportError, ValueError):
        return False
    found = [*(spec.submodule_search_locations or []), spec.origin] if spec else []
    places = [Path(place).resolve() for place in found if place]
    theirs = [project / "outputs", Path(default_output_dir()).resolve()]
    theirs += [] if run_dir is None else [Path(run_dir).expanduser().resolve()]
    return bool(places) and all(
        place.is_relative_to(project)
        and not any(
            place.is_relative_to(folder) or folder.is_relative_to(place) for folder in theirs
        )
        and not re.search(r"/(\.|site-packages/)", str(place)[len(str(project)) :])
        for place in places
    )


def _reason(target: Any, group: str, allowed: Sequence[str], run_dir: Path | None) -> str | None:
    """Why a `_target_` is not taken; None where it is."""

    def is_listed(name: str) -> bool:
        return any(f"{name}.".startswith(f"{one}.") for one in allowed)

    def is_trusted(name: str) -> bool:
        package = name.split(".")[0]
        return package in LIBRARIES or is_listed(name) or is_own(package, run_dir)

    if not isinstance(target, str) or not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", target):
        return "not the name of a class"
    if not is_trusted(target):
        return "somebody else's run may not name it"
    try:
        found = locate(target)
    except NotFound as error:
        return str(error)
    owner = found.__self__ if inspect.ismethod(found) else found
    home = getattr(owner, "__module__", None) or ""
    of_library = home.split(".")[0] in LIBRARIES and not is_listed(home)
    if not is_trusted(home) or (of_library and not re.match(HOMES, home)):
        return f"stands for {home}.{getattr(found, '__qualname__', '')}, which it may not name"
    if inspect.isfunction(found) and not (home.startswith("gptrain.optim.") or is_listed(home)):
        return "a function, not a class"
    if inspect.ismethod(found) and not (group == "data" and found.__name__.startswith("from_")):
        return "not a class"
    return wrong_kind(found, group)

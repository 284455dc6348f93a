"""What the names in a config stand for, and whether they take the keywords given.

Imports what is named, instantiates nothing. An alias is no way around: what counts is where an
object says it was defined, and that it is of the kind that its place needs.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

from gptrain.config.checks.keys import LIGHTNING_TRAINER
from gptrain.config.checks.run import Run
from gptrain.config.checks.targets import (
    HYDRA_PACKAGES,
    allowed_packages,
    hydra_targets,
    lies_in,
)
from gptrain.config.names import nearest
from gptrain.problems import show

# Place -> base class that the object must have, by name: importing them all would take seconds.
KINDS = {
    "model": "torch.nn.modules.module.Module",
    "optimizer": "torch.optim.optimizer.Optimizer",
    "trainer": "lightning.pytorch.trainer.trainer.Trainer",
    "callbacks.": "lightning.pytorch.callbacks.callback.Callback",
    "logger.": "lightning.pytorch.loggers.logger.Logger",
    "profiler": "lightning.pytorch.profilers.profiler.Profiler",
}
# Elsewhere, as an argument of something else, an object of torch or Lightning is one of these.
HARMLESS = {
    *KINDS.values(),
    "torch.utils.data.dataset.Dataset",
    "torch.utils.data.sampler.Sampler",
    "torchmetrics.metric.Metric",
    "lightning.fabric.plugins.precision.precision.Precision",
}
CHECKPOINT = "lightning.pytorch.callbacks.checkpoint.Checkpoint"
FOREIGN = ("torch", "lightning", "pytorch_lightning", "torchmetrics")
# Keys of a group that our own code reads; the rest are keywords of its _target_.
OURS = {
    "model": {"compile", "activation_checkpointing"},
    "optimizer": {"lr", "weight_decay", "lr_scaling", "reference_batch_size"},
    "scheduler": {"warmup_steps", "total_steps", "start_factor", "min_factor"},
}
SUPPLIED = {"optimizer": 1, "scheduler": 1}  # positional arguments that our code gives
OF_HYDRA = {"_target_", "_args_", "_recursive_", "_convert_", "_partial_"}
# Shipped ones, right by a test: not imported here, where a parent of ranks has no use for them.
SHIPPED = {
    "gptrain.lit.callbacks.SampleText": {"prompt", "n_tokens"},
    "gptrain.lit.loggers.TensorBoardLogger": {"save_dir"},
    "gptrain.lit.loggers.CSVLogger": {"save_dir"},
}


def check_objects(run: Run) -> None:
    """Every `_target_`: what it is, and the keywords it is given."""
    allowed = allowed_packages(run)
    for path, node in run.targets():
        target, key = node["_target_"], f"{path}._target_"
        is_shipped = SHIPPED.get(target, {None}) == node.keys() - OF_HYDRA
        if is_shipped or (path == "trainer" and target == LIGHTNING_TRAINER):
            continue
        found, wrong = resolve(target)
        if wrong is None:
            wrong = judge(path, found, allowed)
        if wrong:
            run.error(key, wrong, value=target)
        elif path.startswith("callbacks.") and CHECKPOINT in _bases(found):
            wrong = "a second writer of checkpoints, the run writes its own"
            run.error(key, wrong, value=target, attempt="checkpoint=every_n_steps")
        else:
            _check_keywords(run, path, node, found)
    for key, target, packages in hydra_targets(run):
        if packages and not lies_in(target, HYDRA_PACKAGES):
            found, wrong = resolve(target)
            if wrong or not lies_in(getattr(found, "__module__", "") or "", (*packages, *allowed)):
                run.error(key, wrong or "is defined in a package that is not allowed", value=target)


def resolve(target: str) -> tuple[Any, str | None]:
    """(the object, None), or (None, why there is none)."""
    parts = target.split(".")
    found, depth = None, 0
    for depth in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:depth])
        try:
            found = import_module(name)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                package = (error.name or str(error)).split(".")[0]
                return None, f"needs the package {package}, which is not installed"
        except Exception as error:  # whatever a user's module raises is a line, not a traceback
            reason = (str(error).splitlines() or [""])[0]
            return None, f"{name} cannot be imported: {type(error).__name__}: {reason}"
    if found is None:
        return None, f"no module named {parts[0]}"
    for i in range(depth, len(parts)):
        owner = found
        found = getattr(owner, parts[i], None)
        if found is None:
            near = nearest(parts[i], [name for name in dir(owner) if not name.startswith("_")])
            name = ".".join(parts[:i])
            return None, f"nothing of that name in {name}" + (
                f", did you mean {name}.{near}?" if near else ""
            )
    return found, None


def judge(path: str, found: Any, allowed: tuple[str, ...]) -> str | None:
    """Why an object may not stand at this place of a config; None where it may."""
    home = getattr(found, "__module__", None)
    owner = found
    if isinstance(found, MethodType):  # a class method: a second way to make one
        owner = found.__self__
        home = getattr(owner, "__module__", None)
    if not isinstance(home, str) or not lies_in(home, allowed):
        name = getattr(found, "__qualname__", type(found).__name__)
        return f"stands for {home}.{name}, which is in no package that is allowed"
    if path == "scheduler":
        return None if isinstance(found, FunctionType) else "not a function of the step"
    if not inspect.isclass(owner):
        is_own = isinstance(found, FunctionType) and not lies_in(home, FOREIGN)
        return None if is_own and _kind(path) is None else "not a class"
    bases = _bases(owner)
    kind = _kind(path)
    if kind and kind not in bases:
        return f"no {kind.rpartition('.')[2]}, as this place needs"
    if kind is None and lies_in(home, FOREIGN) and not bases & HARMLESS:
        return "a config may not create objects of this class"
    return None


def _bases(found: Any) -> set[str]:
    """Names of a class and all it inherits from; Lightning's under its newer name, too."""
    bases = {f"{base.__module__}.{base.__qualname__}" for base in getattr(found, "__mro__", ())}
    return bases | {base.replace("pytorch_lightning.", "lightning.pytorch.", 1) for base in bases}


def _kind(path: str) -> str | None:
    for place, kind in KINDS.items():
        if path == place or (
            place.endswith(".") and path.startswith(place) and path.count(".") == 1
        ):
            return kind
    return None


def _check_keywords(run: Run, path: str, node: dict[str, Any], found: Any) -> None:
    given = {key for key in node if key not in OF_HYDRA} - OURS.get(path, set())
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):
        return  # written in C, without one
    taken = signature.parameters
    kinds = inspect.Parameter
    named = [p.name for p in taken.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = named[SUPPLIED.get(path, 0) :]
    if not any(p.kind is kinds.VAR_KEYWORD for p in taken.values()):
        for key in sorted(given - set(named)):
            near = nearest(key, named)
            run.error(
                f"{path}.{key}",
                f"{found.__qualname__} takes no such argument"
                + (f", did you mean {path}.{near}?" if near else ""),
                value=show(node[key]),
                allowed=", ".join(named) or "none",
            )
    if node.get("_partial_") or node.get("_args_") or path in SUPPLIED:
        return
    missing = [
        name
        for name in named
        if taken[name].default is kinds.empty and name not in given and path != "trainer"
    ]
    for name in missing:
        run.error(
            f"{path}.{name}", f"{found.__qualname__} needs it", attempt=f"+{path}.{name}=<value>"
        )

"""Which objects a config may name, by their names alone: nothing is imported.

A name is no proof of what it stands for (`logging.os.system`); `objects` looks at that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from gptrain.config.checks.run import Run
from gptrain.config.names import nearest

PACKAGES = ("gptrain", "torch", "lightning", "pytorch_lightning", "torchmetrics")
# In Hydra's own node only: itself, its plugins, and what these take as samplers.
HYDRA_PACKAGES = ("hydra", "hydra_plugins", "optuna", "ax", "nevergrad")
LOGGING_PACKAGES = ("logging", "colorlog")  # in Hydra's logging only
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")


def check_target_names(run: Run) -> None:
    """Every `_target_` of the config, and every class of Hydra's logging."""
    allowed = allowed_packages(run)
    for path, node in run.targets():
        key = f"{path}._target_" if path else "_target_"
        _judge(run, key, node["_target_"], allowed)
    for key, target, packages in hydra_targets(run):
        _judge(run, key, target, (*packages, *allowed))


def allowed_packages(run: Run) -> tuple[str, ...]:
    """Packages that a `_target_` may lie in."""
    listed = run.get("allowed_targets") or []
    return (*PACKAGES, *(name for name in listed if isinstance(name, str)))


def hydra_targets(run: Run) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """(key, target, packages it may lie in) of Hydra's own node."""
    if run.hydra is None:
        return
    for part in ("launcher", "sweeper", "callbacks"):
        node = OmegaConf.to_container(run.hydra[part], resolve=False) if run.hydra[part] else {}
        for path, target in _find(node, ("_target_",), f"hydra.{part}"):
            yield path, target, HYDRA_PACKAGES
    for part in ("job_logging", "hydra_logging"):
        node = OmegaConf.to_container(run.hydra[part], resolve=False) if run.hydra[part] else {}
        for path, target in _find(node, ("_target_", "class", "()"), f"hydra.{part}"):
            yield path, target, LOGGING_PACKAGES
        for path, value in _find(node, None, f"hydra.{part}"):
            if isinstance(value, str) and "://" in value and value not in STREAMS:
                if value.startswith("cfg://"):
                    continue
                yield path, value, ()


def lies_in(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the packages or below one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _judge(run: Run, key: str, target: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(target, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target):
        if isinstance(target, str) and "://" in target:
            run.error(key, "names an object to import", value=target, allowed=", ".join(STREAMS))
            return
        run.error(
            key,
            "not a dotted name of a class",
            value=target if isinstance(target, str) else repr(target),
            attempt=f"{key}=gptrain.models.SimpleGPT" if key == "model._target_" else "",
        )
        return
    private = any(part.startswith("_") for part in target.split("."))
    if private and not lies_in(target, HYDRA_PACKAGES):  # Hydra's launcher is in hydra._internal
        run.error(key, "names something private", value=target)
        return
    if not lies_in(target, allowed):
        near = nearest(target.split(".")[0], allowed)
        run.error(
            key,
            "not in a package that is allowed" + (f", did you mean {near}?" if near else ""),
            value=target,
            allowed=", ".join(allowed),
            attempt=_trust(target.split(".")[0]),
        )


def _trust(package: str) -> str:
    """Never said of Python's own library, which can do anything."""
    if package in sys.stdlib_module_names:
        return "a class of your own package, and that in allowed_targets"
    return f"allowed_targets=[{package}], if you trust its code"


def _find(node: Any, keys: tuple[str, ...] | None, path: str) -> Iterator[tuple[str, Any]]:
    """Values of these keys in nested mappings and lists; of all keys with None."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        here = f"{path}.{key}"
        if (keys is None and not isinstance(value, dict | list)) or (keys and key in keys):
            yield here, value
        if isinstance(value, dict | list):
            yield from _find(value, keys, here)

"""A config as plain values, with all that was found wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gptrain.config.schema import RunConfig
from gptrain.problems import BAD_CONFIG, DONE, Problem, show

DEEPEST = 20  # levels of a config; a reference to what holds it has no end
NOTHING = object()


@dataclass
class Run:
    """What the rules read and write.

    Attributes:
        values: nested plain values, every reference resolved.
        nodes: dotted key -> value, mappings included; items of lists are not.
        derived: keys whose value was a reference to another key.
        wrong: keys that a rule has already spoken of; others leave them alone.
        schema: the dataclass of the root.
        unresolved: references that lead nowhere, with the keys that they name.
        hydra: Hydra's own node, unresolved; None inside a job.
        world_size: ranks of the job; None before the machine is known.
    """

    values: dict[str, Any]
    nodes: dict[str, Any]
    derived: set[str]
    schema: type = RunConfig
    hydra: DictConfig | None = None
    world_size: int | None = None
    problems: list[Problem] = field(default_factory=list)
    unresolved: list[tuple[Problem, set[str]]] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, cfg: DictConfig) -> Run:
        """Reads a composed config; references that lead nowhere become problems."""
        schema = OmegaConf.get_type(cfg)
        run = cls({}, {}, set(), schema if is_dataclass(schema) else RunConfig)
        for key in cfg:
            if key == "hydra":
                run.hydra = cfg.hydra
                continue
            run.values[key] = run._plain(cfg, key, str(key), 0)
        return run

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; `default` where it is absent or was found wrong."""
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return default if key in self.wrong else value

    def has(self, key: str) -> bool:
        """Whether the key is there, whatever its value."""
        return key in self.nodes

    def sound(self, *keys: str) -> bool:
        """Whether all keys are there, not null, and none was found wrong."""
        return all(self.get(key) is not None for key in keys)

    def error(
        self,
        key: str,
        wrong: str,
        *,
        value: object = NOTHING,
        allowed: str = "",
        attempt: str = "",
        code: int = BAD_CONFIG,
    ) -> None:
        """Adds a problem; the value shown is the key's own unless another is given."""
        if value is NOTHING:
            value = show(self.nodes[key]) if key in self.nodes else None
        problem = Problem(key, value, wrong, allowed, attempt, code)
        if problem not in self.problems:
            self.problems.append(problem)
        if code != DONE:
            self.wrong.add(key)

    def warn(self, key: str, wrong: str, **options: Any) -> None:
        """Adds a warning."""
        self.error(key, wrong, code=DONE, **options)

    def settle(self) -> list[Problem]:
        """All problems; of references only those that name no key that is told already."""
        own: dict[str, Problem] = {}
        for one, names in self.unresolved:
            if not names & (self.wrong - {one.key}):
                own.setdefault(one.wrong, one)
        return [*own.values(), *self.problems]

    @property
    def failed(self) -> bool:
        """Whether the config itself is wrong."""
        return any(problem.code == BAD_CONFIG for problem in self.settle())

    def targets(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Dotted key and node of all that has a `_target_`."""
        yield from _targets(self.values, "")

    def _plain(self, node: Container, key: Any, path: str, depth: int) -> Any:
        refers = OmegaConf.is_interpolation(node, key)
        try:
            value = node[key]
        except MissingMandatoryValue:
            self.error(path, "required and not set", value=None, attempt=f"{path}=<value>")
            return None
        except (OmegaConfBaseException, RecursionError, KeyError, ValueError, TypeError) as error:
            raw = OmegaConf.to_container(node, resolve=False)[key]
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if isinstance(error, RecursionError):
                reason = "it refers to itself"
            problem = Problem(path, show(raw), f"cannot be resolved: {reason}")
            self.unresolved.append((problem, set(re.findall(r"[\w.]+", str(raw)))))
            self.wrong.add(path)
            return None
        if depth > DEEPEST:
            self.error(path, "refers to its own parent, so it never ends", value=None)
            return None
        if refers:
            self.derived.add(path)
        if isinstance(value, DictConfig):
            plain = {k: self._plain(value, k, f"{path}.{k}", depth + 1) for k in value}
            if refers:
                self.derived |= {f"{path}.{k}" for k in value}
            self.nodes[path] = plain
            return plain
        if isinstance(value, ListConfig):
            value = [self._plain(value, i, f"{path}[{i}]", depth + 1) for i in range(len(value))]
            for i in range(len(value)):
                self.nodes.pop(f"{path}[{i}]", None)
        self.nodes[path] = value
        return value


def _targets(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from _targets(item, f"{path}[{i}]")
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}" if path else str(key))

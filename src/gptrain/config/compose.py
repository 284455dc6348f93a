"""From overrides to a config, with every override that does not fit told by itself.

Hydra stops at the first. Here the groups are composed first, then the values are put in one by
one, so that the rest of the command can be checked, too.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from functools import cached_property

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from gptrain.config.schema import PROJECT
from gptrain.config.wording import (
    explain_base,
    explain_before,
    explain_group,
    explain_parse,
    explain_value,
)
from gptrain.problems import Problem

CONF = str(PROJECT / "conf")
NOT_RUN = ("schema", "_dummy_empty_config_")  # primary configs by name: our types, Hydra's nothing
# What Hydra raises on words that it cannot use; ValueError and others are not wrapped by it.
REFUSALS = (
    HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, KeyError,
    AttributeError, OSError, RecursionError,
)  # fmt: skip


@dataclass
class Composed:
    """A command as far as it could be composed.

    Attributes:
        cfg: with Hydra's own node; None if not even the groups could be composed.
        overrides: those that took effect.
    """

    cfg: DictConfig | None
    overrides: list[str]
    problems: list[Problem] = field(default_factory=list)


@dataclass
class Composer:
    """Composes commands over one set of folders, without touching Hydra's global state.

    Attributes:
        config_name: of the primary config.   config_path: folder of it, or a `pkg://`.
        config_dir: a folder more, searched before.
        many: keep what was composed, for the next command.
    """

    config_name: str = "train"
    config_path: str = CONF
    config_dir: str | None = None
    many: bool = False

    @cached_property
    def hydra(self) -> Hydra:
        """Hydra with its plugins found, which costs a tenth of a second."""
        version.setbase("1.3")
        search_path = create_config_search_path(self.config_path)
        if self.config_dir is not None:
            search_path.prepend(
                "command-line",
                f"file://{os.path.abspath(self.config_dir)}",
                SearchPathQuery(provider="schema"),
            )
        return Hydra("train", ConfigLoaderImpl(search_path))

    def resolve(self, config_path: str) -> str:
        """--config-path as Hydra takes it: relative to train.py, or a package."""
        return config_path if config_path.startswith("pkg://") else str(PROJECT / config_path)

    def check_folders(self) -> list[Problem]:
        """Folders of --config-path and --config-dir that do not exist, and the config itself."""
        folders = {"--config-dir": self.config_dir}
        if not self.config_path.startswith("pkg://"):
            folders["--config-path"] = self.config_path
        wrong = "no such folder"
        problems = [
            Problem(flag, folder, wrong)
            for flag, folder in folders.items()
            if folder is not None and not os.path.isdir(folder)
        ]
        if not problems and not self.hydra.config_loader.repository.config_exists(self.config_name):
            problems.append(self._no_such_config("no such config"))
        elif not problems and self.config_name in NOT_RUN:
            problems.append(self._no_such_config("holds no run, only keys"))
        return problems

    def _no_such_config(self, wrong: str) -> Problem:
        known = [name for name in self.choices("") if name not in NOT_RUN]
        return Problem("--config-name", self.config_name, wrong, ", ".join(known))

    @cached_property
    def _composed(self) -> dict[tuple[str, ...], DictConfig]:
        return {}

    def compose_all(self, overrides: list[str]) -> DictConfig:
        """As Hydra does it; raises what Hydra raises.

        Jobs of a sweep mostly share their groups: what was composed once is copied.
        """
        key = tuple(overrides)
        if key not in self._composed:
            self._composed[key] = self._compose(overrides)
        return copy.deepcopy(self._composed[key]) if self.many else self._composed.pop(key)

    def _compose(self, overrides: list[str]) -> DictConfig:
        return self.hydra.compose_config(self.config_name, list(overrides), RunMode.RUN)

    def compose(self, overrides: list[str]) -> Composed:
        """The config of all overrides that fit, and a problem for each that does not."""
        problems: list[Problem] = []
        groups, values = [], []
        for line in overrides:
            parsed = self._parse(line, problems)
            if parsed is None:
                continue
            if self._is_group(parsed):
                found = explain_group(parsed, self.choices)
                problems += [found] if found else []
                groups += [] if found else [parsed]
            else:
                values.append(parsed)
        cfg, taken = self._compose_groups(groups, problems)
        if cfg is None:
            return Composed(None, [], problems)
        for override in values:
            found = explain_before(override, cfg)
            if found:
                problems.append(found)
                continue
            try:
                ConfigLoaderImpl._apply_overrides_to_config([override], cfg)
                taken.append(override.input_line)
            except REFUSALS as error:
                problems.append(explain_value(override, error, cfg, self.choices))
        return Composed(cfg, taken, problems)

    def parse(self, overrides: list[str]) -> tuple[list[Override], list[Problem]]:
        """Overrides as Hydra reads them, those of a sweep included."""
        parsed, problems = [], []
        for line in overrides:
            try:
                parsed += OverridesParser.create().parse_overrides([line])
            except REFUSALS as error:
                problems.append(explain_parse(line, error))
        return parsed, problems

    def choices(self, group: str) -> list[str]:
        """Names of the configs of a group; empty if there is no such group."""
        return self.hydra.config_loader.get_group_options(group, ObjectType.CONFIG)

    def _parse(self, line: str, problems: list[Problem]) -> Override | None:
        parsed, found = self.parse([line])
        problems += found
        if not parsed:
            return None
        if not parsed[0].key_or_group:
            problems.append(explain_parse(line, None))
            return None
        if parsed[0].is_sweep_override():
            problems.append(explain_parse(line, None, parsed[0]))
            return None
        return parsed[0]

    def _is_group(self, override: Override) -> bool:
        key = override.key_or_group
        if key == "hydra.searchpath":  # decides where groups are
            return True
        if isinstance(override.value(), dict):
            return False
        return self.hydra.config_loader.repository.group_exists(key)

    def _compose_groups(
        self, groups: list[Override], problems: list[Problem]
    ) -> tuple[DictConfig | None, list[str]]:
        lines = [override.input_line for override in groups]
        try:
            return self.compose_all(lines), lines
        except REFUSALS:
            pass
        try:
            self.compose_all([])
        except REFUSALS as error:  # nothing that was typed is to blame
            problems.append(explain_base("", error))
            return None, []
        good: list[str] = []
        for line in lines:  # one by one: which of them is it
            try:
                self.compose_all([*good, line])
                good.append(line)
            except REFUSALS as error:
                problems.append(explain_base(line, error))
        return self.compose_all(good), good

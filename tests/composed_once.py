"""Let Hydra parse each override, and find and merge the yaml files of groups, once for all tests.

A run composes its config, which takes 0.1 s, more than the steps of a tiny run. Most tests choose
the same groups. References and checks are not cached. If a yaml file has changed, nothing is taken
from the cache.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections import defaultdict
from collections.abc import Callable
from functools import cache, wraps
from hashlib import sha1
from pathlib import Path
from typing import Any
from unittest.mock import patch

import omegaconf._utils
import omegaconf.base
import omegaconf.omegaconf
import yaml
from hydra._internal import config_loader_impl, config_repository, defaults_list
from hydra.core.override_parser import overrides_parser
from omegaconf import DictConfig, ListConfig, Node, ValueNode

made: dict[tuple, bytes] = {}  # pickled: loading is five times as fast as `deepcopy`


@cache
def compose_once() -> None:
    """Cache results of Hydra from now on. Functions that this Hydra lacks are left out."""
    loader = config_loader_impl.ConfigLoaderImpl
    for owner, name, wrap in (
        (defaults_list, "_create_defaults_list", _find_once),
        (loader, "_compose_config_from_defaults_list", _make_once),
        (config_repository.ConfigRepository, "load_config", _make_once),
        (overrides_parser.OverridesParser, "parse_rule", _parse_once),
        (omegaconf.base, "parse", cache),
        (omegaconf._utils, "parse", cache),
    ):
        if hasattr(owner, name):
            patch.object(owner, name, wrap(getattr(owner, name))).start()
    if yaml.__with_libyaml__:
        patch.object(omegaconf.omegaconf, "get_omega_conf_dumper", _fast_dumper).start()
    for node in (DictConfig, ListConfig, *ValueNode.__subclasses__()):
        node.__deepcopy__ = _copy


@cache
def _fast_dumper() -> type:
    """Return OmegaConf's dumper with the emitter of libyaml, which writes the same in C."""
    known = ("str_representer", "yaml_representers", "yaml_implicit_resolvers")
    slow = omegaconf._utils.get_omega_conf_dumper()
    return type("Dumper", (yaml.CDumper,), {name: getattr(slow, name) for name in known})


def _shallow(original: Any) -> Any:
    """Return a copy, in a tenth of the time that `copy.copy` takes."""
    made = object.__new__(type(original))
    vars(made).update(vars(original))
    return made


def _copy(node: Node, _: object) -> Node:
    """Copy a node of a config, and share its values, which never change."""
    made = _shallow(node)
    about = vars(made)["_metadata"] = _shallow(vars(node)["_metadata"])
    about.flags = dict(about.flags or {})
    known = {key: dict(values) for key, values in about.resolver_cache.items()}
    about.resolver_cache = defaultdict(dict, known)
    content: Any = vars(node).get("_content")
    if isinstance(content, dict):
        content = {key: copy.deepcopy(child) for key, child in content.items()}
    elif isinstance(content, list):
        content = [copy.deepcopy(child) for child in content]
    else:
        return made
    vars(made)["_content"] = content
    for child in content.values() if isinstance(content, dict) else content:
        vars(child)["_parent"] = made
    return made


def _find_once(find: Callable) -> Callable:
    """Cache the list of defaults, and the choices that Hydra records while it makes the list."""

    @wraps(find)
    def found(repo, config_name, overrides, prepend_hydra, skip_missing):
        typed = (overrides.override_choices, overrides.append_group_defaults, overrides.deletions)
        key = (config_name, repr(typed), prepend_hydra, _files(repo))
        if (
            skip_missing and key not in made
        ):  # a cached list without `skip_missing` has no missing entry
            key = (*key, skip_missing)

        def listed_and_notes() -> tuple:
            listed = find(repo, config_name, overrides, prepend_hydra, skip_missing)
            return listed, {k: v for k, v in vars(overrides).items() if k != "config_overrides"}

        listed, notes = _made(key, listed_and_notes)
        vars(overrides).update(notes)
        return listed

    return found


def _make_once(make: Callable) -> Callable:
    """Cache one yaml file, or the merged files of a list of defaults."""

    @wraps(make)
    def make_or_find(self, **given):
        what = {name: value for name, value in given.items() if name != "repo"}
        key = (repr(what), _files(given.get("repo", self)))
        return _made(key, lambda: make(self, **given))

    return make_or_find


def _parse_once(parse: Callable) -> Callable:
    """Cache what an override means."""
    return wraps(parse)(lambda self, *text: _made(("rule", *text), lambda: parse(self, *text)))


def _made(key: tuple, make: Callable[[], Any]) -> Any:
    """Return what this process, or another one of the tests, has made for a key, or make it."""
    file = Path(os.environ["GPTRAIN_TEST_RUNS"], sha1(repr(key).encode()).hexdigest())
    if key not in made and file.exists():
        made[key] = file.read_bytes()
    if key not in made:
        made[key] = pickle.dumps(make())
        new = file.with_name(f"{file.name}-{os.getpid()}")
        new.write_bytes(made[key])
        new.rename(file)
    return pickle.loads(made[key])


def _files(repo: object) -> tuple:
    """Return the sources of a config, and the time and size of each yaml file in them."""
    sources = [(source.scheme(), source.path) for source in repo.get_sources()]
    folders = [Path(path) for scheme, path in sources if scheme == "file"]
    files = sorted(path for folder in folders for path in folder.rglob("*.yaml"))
    state = [(str(path), (stat := path.lstat()).st_mtime_ns, stat.st_size) for path in files]
    return (*sources, *state)

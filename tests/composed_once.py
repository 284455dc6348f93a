"""Hydra finds and merges the files of one choice of groups once for all tests of a process.

A run composes its config twice, 0.1 s each, which is more than a tiny run's steps take; most
tests type the same groups. What comes after it (overrides of keys, references, checks) is done anew
for each command, as is everything where a yaml file has changed.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from unittest.mock import patch

from hydra._internal import config_loader_impl, config_repository, defaults_list

_made: dict[tuple, bytes] = {}  # pickled: copied five times faster than by `deepcopy`


@cache
def compose_once() -> None:
    """From here on in this process; where Hydra is another inside, nothing changes."""
    loader = config_loader_impl.ConfigLoaderImpl
    for owner, name, wrap in (
        (defaults_list, "_create_defaults_list", _find_once),
        (loader, "_compose_config_from_defaults_list", _make_once),
        (config_repository.ConfigRepository, "load_config", _make_once),
    ):
        if hasattr(owner, name):
            patch.object(owner, name, wrap(getattr(owner, name))).start()
    # Copied for each command, to be given other sources, and by value: two hundredths of a second.
    repository = config_repository.ConfigRepository
    patch.object(repository, "__deepcopy__", lambda one, _: copy.copy(one), create=True).start()


def _find_once(find: Callable) -> Callable:
    """The list of defaults; what is noted of the choices on the way is noted again."""

    @wraps(find)
    def found(repo, config_name, overrides, prepend_hydra, skip_missing):
        typed = (overrides.override_choices, overrides.append_group_defaults, overrides.deletions)
        key = (config_name, repr(typed), prepend_hydra, _files(repo))
        if skip_missing and key not in _made:  # else nothing is missing
            key = (*key, skip_missing)
        if key not in _made:
            listed = find(repo, config_name, overrides, prepend_hydra, skip_missing)
            notes = {k: v for k, v in vars(overrides).items() if k != "config_overrides"}
            _made[key] = pickle.dumps((listed, notes))
        listed, notes = pickle.loads(_made[key])
        vars(overrides).update(notes)
        return listed

    return found


def _make_once(make: Callable) -> Callable:
    """One yaml file, or all those of a list of defaults merged."""

    @wraps(make)
    def made(self, **given):
        what = {name: value for name, value in given.items() if name != "repo"}
        key = (repr(what), _files(given.get("repo", self)))
        if key not in _made:
            _made[key] = pickle.dumps(make(self, **given))
        return pickle.loads(_made[key])

    return made


def _files(repo: object) -> tuple:
    """The sources of a config, and each yaml file in them as it is now."""
    sources = [(source.scheme(), source.path) for source in repo.get_sources()]
    folders = [Path(path) for scheme, path in sources if scheme == "file"]
    files = sorted(path for folder in folders for path in folder.rglob("*.yaml"))
    state = [(str(path), (stat := path.lstat()).st_mtime_ns, stat.st_size) for path in files]
    return (*sources, *state)

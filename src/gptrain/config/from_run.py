"""An old run by its folder: the overrides it was started with, then those typed now.

python train.py from_run=outputs/a task=test            its best checkpoint, evaluated
python train.py from_run=outputs/a optimizer.lr=1e-3    the same run with another learning rate

The folder may be a stranger's: what its overrides say beyond today's conf/ is judged by `trust`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hydra.core.override_parser.types import Override

from gptrain.config import trust
from gptrain.config.compose import compose_and_explain, compose_config, parse, plain
from gptrain.problems import BAD_DATA, INPUT_NOT_FOUND, ConfigError, Problem
from gptrain.small_files import UnreadableFile, read_yaml

# Where the old run lay and wrote, how it went on there, and what it was allowed.
NOT_TAKEN = {
    "run_dir", "output_dir", "logger", "profiler", "hydra", "ckpt_path", "allow_changes",
    "from_run", "allowed_targets",
}  # fmt: skip
TYPED = ("allowed_targets", "hydra.searchpath")  # what the user allows, and --config-dir
FREE = ("name", "init_from")  # keys without a dot that are no choices
OUTSIDE = r"\.\.|://|\$|(^|[\[,'\" ])/"  # a choice of no file in conf/


def expand(typed: list[str]) -> list[str]:
    """The overrides of the run that `from_run` names, where it is typed, before those typed.

    A typed key replaces an old one; a typed `~key` leaves an old override out.

    Raises: ConfigError, naming each old override that is refused.
    """
    now, _ = parse(typed)
    named = [one for one in now if one.key_or_group == "from_run"]
    if any(one.is_sweep_override() for one in named):
        given = named[0].input_line.partition("=")[2]
        raise ConfigError.of("from_run", given, "several runs; one is taken up, also by a sweep")
    folders = [one.value() for one in named]
    if not folders or not isinstance(folders[-1], str):
        return typed
    settled = {one.key_or_group for one in now}
    settled |= {"init_from"} if "ckpt_path" in settled else set()  # it goes on, past its beginning
    every = [one for one in read_overrides(folders[-1]) if not _is_left_out(one)]
    old = [one for one in every if one.key_or_group not in settled]
    if problems := list(_find_refused(old, now, folders[-1])):
        raise ConfigError(problems)
    gone = {one.key_or_group for one in every if not one.is_delete()}
    deleted = {one.input_line for one in now if one.is_delete() and one.key_or_group in gone}
    return [*(one.input_line for one in old), *(line for line in typed if line not in deleted)]


def read_overrides(run_dir: str) -> list[Override]:
    """What was typed to start a run.

    Raises: ConfigError with code 66 if there is no run in that folder, 65 if it cannot be read.
    """
    file = Path(run_dir).expanduser() / ".hydra" / "overrides.yaml"
    try:
        lines = read_yaml(file)
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise UnreadableFile(file, "not a list of overrides")
    except (FileNotFoundError, NotADirectoryError):
        wrong = f"no run in this folder, {file} is missing"
        raise ConfigError.of("from_run", run_dir, wrong, code=INPUT_NOT_FOUND) from None
    except (UnreadableFile, OSError) as error:
        raise ConfigError.of("from_run", run_dir, str(error), code=BAD_DATA) from None
    parsed, problems = parse(lines)
    if problems:
        raise ConfigError.of("from_run", run_dir, str(problems[0]), code=BAD_DATA)
    return parsed


def _is_left_out(one: Override) -> bool:
    names = (one.key_or_group, one.package or "")
    parts = [name.replace("/", ".").split(".") for name in names]
    return any(part[0] in NOT_TAKEN or part[-1] in trust.WRITTEN for part in parts)


def _find_refused(old: list[Override], now: list[Override], run_dir: str) -> Iterator[Problem]:
    """What of an old run's overrides today's schema or `trust` refuses."""
    lines = [one.input_line for one in old]
    undotted = [one for one in old if "." not in one.key_or_group]
    found = [
        Problem(one.key_or_group, value, "not a choice of conf/")
        for one in undotted
        if re.search(OUTSIDE, value := one.input_line.partition("=")[2])
        and one.key_or_group not in FREE
    ]
    if not found:  # what is composed reads no file but those of conf/
        here = [one.input_line for one in now if one.key_or_group in TYPED]
        cfg, found = compose_and_explain([*here, *lines])
    if not found:
        choices = [one.input_line for one in undotted if "{" not in one.input_line]
        own = compose_config([*here, *choices])
        found = trust.check(plain(cfg), plain(own), cfg.allowed_targets, Path(run_dir))
    for one in found:
        wrong = f"was started with {one.key}={one.value}: {one.wrong}"
        yield Problem("from_run", run_dir, wrong, attempt=one.attempt or f"'~{one.key}'")

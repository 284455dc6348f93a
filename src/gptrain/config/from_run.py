"""An old run by its folder: the overrides it was started with, then those typed now.

python train.py from_run=outputs/a task=test            its best checkpoint, evaluated
python train.py from_run=outputs/a optimizer.lr=1e-3    the same run with another learning rate

The folder may be a stranger's: what its overrides name and refer to is judged by `trust`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from gptrain.config import trust
from gptrain.config.compose import REFUSALS, Place, compose_config, compose_or_explain, parse
from gptrain.problems import BAD_DATA, INPUT_NOT_FOUND, ConfigError, Problem
from gptrain.small_files import UnreadableFile, read_yaml

# Where the old run lay and wrote, how it went on there, and what it was allowed.
NOT_TAKEN = (
    "run_dir", "output_dir", "logger", "profiler", "hydra", "ckpt_path", "allow_changes", "from_run",
    "allowed_targets",
)  # fmt: skip


def expand(typed: list[str], place: Place = Place()) -> list[str]:
    """The overrides of the run that `from_run` names, where it is typed, before those typed.

    A typed key replaces an old one, a typed `~key` leaves out an old override of a key that no
    longer exists.

    Raises: ConfigError, naming each old override that is refused.
    """
    parsed = parse(typed)
    named = [one for one in parsed if one.key_or_group == "from_run"]
    if not named or named[-1].value() is None:
        return typed
    folder = str(named[-1].value())
    if named[-1].is_sweep_override():
        raise ConfigError([Problem("from_run", folder, "one folder at a time")])
    settled = {one.key_or_group for one in parsed}
    if "ckpt_path" in settled:
        settled.add("init_from")  # goes on, past its beginning
    old = [
        one
        for one in read_overrides(folder)
        if not _is_left_out(one) and one.input_line not in typed and one.key_or_group not in settled
    ]
    gone = {one.input_line for one in parsed if one.is_delete() and _is_unknown(one, place)}
    typed = [line for line in typed if line not in gone]
    _check_overrides(folder, old, typed, place)
    return [*(one.input_line for one in old), *typed]


def read_overrides(run_dir: str) -> list[Override]:
    """What was typed to start a run.

    Raises: ConfigError with code 66 if there is no run in that folder, 65 if it cannot be read.
    """
    file = Path(run_dir).expanduser() / ".hydra" / "overrides.yaml"
    try:
        lines = read_yaml(file)
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise UnreadableFile(file, "not a list of overrides")
        return parse(lines)
    except (FileNotFoundError, NotADirectoryError):
        wrong = f"no run in this folder, {file.parent.name}/{file.name} is missing"
        raise ConfigError([Problem("from_run", run_dir, wrong, code=INPUT_NOT_FOUND)]) from None
    except (UnreadableFile, OSError, ConfigError) as error:
        wrong = str(error).splitlines()[0]
        raise ConfigError([Problem("from_run", run_dir, wrong, code=BAD_DATA)]) from None


def _is_left_out(one: Override) -> bool:
    names = (one.key_or_group, one.package or "")
    return any(name.replace("/", ".").split(".")[0] in NOT_TAKEN for name in names if name)


def _is_unknown(one: Override, place: Place) -> bool:
    try:
        compose_config([one.input_line], place)
        return False
    except REFUSALS:
        return True


def _check_overrides(folder: str, old: list[Override], typed: list[str], place: Place) -> None:
    """Raises ConfigError for old overrides that today's schema or `trust` refuses."""

    def refuse(one: Override, why: str) -> None:
        wrong = f"was started with {one.input_line}, {why}"
        problems.append(Problem("from_run", folder, wrong, attempt=f"'~{one.key_or_group}'"))

    problems: list[Problem] = []
    for one in old:
        value = one.input_line.partition("=")[2]
        if one.is_sweep_override() or not trust.is_plain(one.input_line):
            refuse(one, "which is no plain value")
        elif ".." in value.split("/") or (value.lstrip("'\"").startswith("/") and _is_choice(one)):
            refuse(one, "which leaves the folder of the configs")
    if not problems:
        now = [line for line in typed if line.lstrip("+").startswith("allowed_targets=")]
        allowed = list(compose_config(now, place).allowed_targets)
        for one in old:
            group, node = _node_of(one)
            for problem in trust.check_targets(node, group, allowed) if node else ():
                refuse(one, f"{problem.wrong}; {problem.attempt}".rstrip("; "))
    if not problems:
        try:
            compose_or_explain([one.input_line for one in old], place)
        except ConfigError as error:
            for found in error.problems:
                one = next((o for o in old if o.key_or_group == found.key), None)
                words = "a key that no longer exists" if "key" in found.wrong else found.wrong
                refuse(one, words) if one else problems.append(found)
    if problems:
        raise ConfigError(problems)


def _node_of(one: Override) -> tuple[str, dict[str, Any]]:
    """(group, what an override puts below it) where that names a `_target_`."""
    if one.is_delete() or "_target_" not in one.input_line:
        return "", {}
    node = OmegaConf.to_container(OmegaConf.create({"at": one.value()}))["at"]
    group, *rest = one.key_or_group.split(".")
    for part in reversed(rest):
        node = {part: node}
    return group, node if isinstance(node, dict) else {}


def _is_choice(one: Override) -> bool:
    return "." not in one.key_or_group

"""An old run by its folder: the overrides it was started with, then those typed now.

python train.py from_run=outputs/a task=test            its best checkpoint, evaluated
python train.py from_run=outputs/a optimizer.lr=1e-3    the same run with another learning rate

The folder may be a stranger's: what its overrides name and refer to is judged by `trust`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from gptrain.config import trust
from gptrain.config.compose import ANYWHERE, Place, compose_and_explain, compose_config, parse
from gptrain.problems import BAD_DATA, INPUT_NOT_FOUND, ConfigError, Problem
from gptrain.small_files import UnreadableFile, read_yaml

# Where the old run lay and wrote, how it went on there, and what it was allowed.
NOT_TAKEN = {
    "run_dir", "output_dir", "logger", "profiler", "hydra", "ckpt_path", "allow_changes",
    "from_run", "allowed_targets",
}  # fmt: skip


def expand(typed: list[str], place: Place = ANYWHERE) -> list[str]:
    """The overrides of the run that `from_run` names, where it is typed, before those typed.

    A typed key replaces an old one; a typed `~key` leaves an old override out.

    Raises: ConfigError, naming each old override that is refused.
    """
    now, _ = parse(typed)
    folders = [one.value() for one in now if one.key_or_group == "from_run"]
    if not folders or not isinstance(folders[-1], str):
        return typed
    settled = {one.key_or_group for one in now}
    settled |= {"init_from"} if "ckpt_path" in settled else set()  # it goes on, past its beginning
    run_dir = Path(folders[-1])
    every = [one for one in read_overrides(folders[-1]) if not _is_left_out(one)]
    old = [one for one in every if one.key_or_group not in settled]
    allowed = [one.input_line for one in now if one.key_or_group == "allowed_targets"]
    problems = [
        Problem("from_run", folders[-1], f"was started with {line}: {why}", attempt=f"'~{key}'")
        for key, line, why in _find_refused(old, allowed, place, run_dir)
    ]
    if problems:
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
        wrong, code = f"no run in this folder, {file} is missing", INPUT_NOT_FOUND
        raise ConfigError([Problem("from_run", run_dir, wrong, code=code)]) from None
    except (UnreadableFile, OSError) as error:
        raise ConfigError([Problem("from_run", run_dir, str(error), code=BAD_DATA)]) from None
    parsed, problems = parse(lines)
    if problems:
        raise ConfigError([Problem("from_run", run_dir, str(problems[0]), code=BAD_DATA)])
    return parsed


def _is_left_out(one: Override) -> bool:
    names = (one.key_or_group, one.package or "")
    parts = [name.replace("/", ".").split(".") for name in names]
    return any(part[0] in NOT_TAKEN or part[-1] in trust.WRITTEN for part in parts)


def _find_refused(
    old: list[Override], allowed: list[str], place: Place, run_dir: Path
) -> Iterator[tuple[str, str, str]]:
    """(key, override, why) of old overrides that `trust` or today's schema refuses."""
    allowed_now, refused = compose_config(allowed, place).allowed_targets, False
    for one in old:
        for why in _find_distrust(one, allowed_now, run_dir):
            refused = True
            yield one.key_or_group, one.input_line, why
    if not refused:
        cfg, problems = compose_and_explain([one.input_line for one in old], place)
        values = OmegaConf.to_container(
            OmegaConf.masked_copy(cfg, [k for k in cfg if k != "hydra"])
        )
        for problem in problems or trust.check_references(values):
            yield problem.key, f"{problem.key}={problem.value}", problem.wrong


def _find_distrust(one: Override, allowed: list[str], run_dir: Path) -> Iterator[str]:
    value = one.input_line.partition("=")[2]
    if one.is_sweep_override() or not trust.is_plain(one.input_line):
        yield "not a plain value"
    elif "." not in one.key_or_group and one.key_or_group != "init_from" and _is_outside(value):
        yield "not a choice of conf/"
    elif "_target_" in one.input_line and not one.is_delete():
        group, *rest = one.key_or_group.split(".")
        node = OmegaConf.to_container(OmegaConf.create({"at": one.value()}))["at"]
        for part in reversed(rest):
            node = {part: node}
        for problem in trust.check_targets(node, group, allowed, run_dir):
            yield f"{problem.wrong}{f'; {problem.attempt}' * bool(problem.attempt)}"


def _is_outside(choice: str) -> bool:
    return ".." in choice or "://" in choice or choice.lstrip("['\"").startswith("/")

"""An old run by its folder: the overrides it was started with, then those typed now.

python train.py from_run=outputs/a task=test            its best checkpoint, evaluated
python train.py from_run=outputs/a optimizer.lr=1e-3    the same run with another rate
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from gptrain.config.compose import REFUSALS
from gptrain.problems import INPUT_NOT_FOUND, ConfigError, Problem

# Where the old run lay and how it went on there; the new one has a folder of its own.
NOT_TAKEN = {"run_dir", "ckpt_path", "allow_changes", "from_run"}


def expand(typed: list[str], compose: Callable[[list[str]], object]) -> list[str]:
    """The overrides of the run that `from_run` names, where it is typed, before those typed.

    To expand twice changes nothing. A typed `~key` leaves out an old override of a key that no
    longer exists.

    Args:
        compose: today's schema; raises where overrides do not fit it.

    Raises: ConfigError, naming each old override that does not fit today's schema.
    """
    parsed = OverridesParser.create().parse_overrides(typed)
    folders = [override for override in parsed if override.key_or_group == "from_run"]
    if not folders or folders[-1].value() is None:
        return typed
    folder = folders[-1].value()
    if folders[-1].is_sweep_override():
        raise ConfigError([Problem("from_run", folders[-1].value_string(), "one folder at a time")])
    settled = {override.key_or_group for override in parsed}
    without = {"init_from"} if "ckpt_path" in settled else set()  # goes on, past its beginning
    old = [
        override
        for override in read_overrides(str(folder))
        if override.key_or_group not in NOT_TAKEN | without and override.input_line not in typed
    ]
    refused = _find_refused(old, compose)  # by line
    problems = [
        Problem("from_run", folder, refused[override.input_line], attempt=f"'~{key}'")
        for override in old
        if override.input_line in refused and (key := override.key_or_group) not in settled
    ]
    if problems:
        raise ConfigError(problems)
    gone = {f"~{override.key_or_group}" for override in old if override.input_line in refused}
    kept = [override.input_line for override in old if override.input_line not in refused]
    return kept + [line for line in typed if line not in gone]


def read_overrides(run_dir: str) -> list[Override]:
    """What was typed to start a run.

    Raises: ConfigError with code 66 if there is no run in that folder.
    """
    file = Path(run_dir).expanduser() / ".hydra" / "overrides.yaml"
    if not file.is_file():
        wrong = f"no run in this folder, {file.parent.name}/{file.name} is missing"
        raise ConfigError([Problem("from_run", run_dir, wrong, code=INPUT_NOT_FOUND)])
    lines = OmegaConf.to_container(OmegaConf.load(file))
    return OverridesParser.create().parse_overrides(lines)


def _find_refused(old: list[Override], compose: Callable[[list[str]], object]) -> dict[str, str]:
    """Old overrides that today's schema refuses -> why."""
    try:
        compose([override.input_line for override in old])
        return {}
    except REFUSALS:
        compose([])  # where this is refused, too, the old run is not at fault
    good, refused = [], {}  # one by one: the first that is refused hides the others
    for override in old:
        try:
            compose([*good, override.input_line])
            good.append(override.input_line)
        except REFUSALS as error:
            refused[override.input_line] = (
                f"was started with {override.input_line}, {_reason(error)}"
            )
    return refused


def _reason(error: Exception) -> str:
    if isinstance(error.__cause__ or error, ConfigAttributeError | ConfigKeyError):
        return "a key that no longer exists"
    said = str(error).strip() or type(error).__name__
    return f"which is refused now: {said.splitlines()[0]}"

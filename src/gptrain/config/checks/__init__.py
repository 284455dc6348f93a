"""All that is wrong with a run, before anything is started or written.

A  on the composed config alone; imports nothing heavy (versions, keys, values, arithmetic,
   strategies, targets by name)
B  once the machine is known (place: launcher and folder, no torch; machine: devices, memory, and
   targets by what they are)
C  on the headers of data and checkpoints (files)
"""

from __future__ import annotations

from omegaconf import DictConfig

from gptrain.config.checks.arithmetic import check_arithmetic
from gptrain.config.checks.extras import check_extras
from gptrain.config.checks.files import check_contents, check_paths
from gptrain.config.checks.keys import check_keys
from gptrain.config.checks.old_run import check_old_run
from gptrain.config.checks.place import check_place
from gptrain.config.checks.run import Run
from gptrain.config.checks.strategies import check_strategy
from gptrain.config.checks.targets import check_target_names
from gptrain.config.checks.values import check_values
from gptrain.config.checks.versions import check_versions
from gptrain.config.checks.world import check_known_world
from gptrain.problems import ConfigError, Problem

__all__ = ["check", "find_problems"]

CONFIG = (
    check_versions,
    check_keys,
    check_values,
    check_target_names,
    check_arithmetic,
    check_strategy,
)
# Of this machine, and cheap: they all run, so that everything is told at once.
PLACE = (check_place, check_old_run, check_extras, check_known_world, check_paths)


def check(cfg: DictConfig) -> list[Problem]:
    """The warnings of a composed config that can run.

    Raises: ConfigError with every problem.
    """
    found = find_problems(cfg)
    errors = [problem for problem in found if problem.code]
    if errors:
        raise ConfigError(errors)
    return found


def find_problems(cfg: DictConfig, cheap: bool = False) -> list[Problem]:
    """All problems and warnings of a composed config, with or without Hydra's own node.

    Args:
        cheap: only what needs no torch and reads no file, because the run is refused anyway.
    """
    run = Run.of(cfg)
    runs_here = run.schema.runs_here
    for look in (*CONFIG, *PLACE) if runs_here else (*CONFIG, check_known_world):
        look(run)
    if runs_here and not cheap and not run.failed:  # torch and reading files are worth it now
        from gptrain.config.checks.machine import check_machine
        from gptrain.config.checks.objects import check_objects

        check_machine(run)
        check_objects(run)
        check_contents(run, cfg)
    return run.settle()

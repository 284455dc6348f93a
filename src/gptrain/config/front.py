"""From the command line to the job: compose, check, and only then let Hydra write anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from gptrain.config.checks import check
from gptrain.config.from_run import expand
from gptrain.config.help import help_text
from gptrain.config.problems import ConfigError
from gptrain.config.process import this_process
from gptrain.config.schema import PROJECT, RunConfig, register

CONF = str(PROJECT / "conf")


def main(
    job: Callable[[DictConfig], float | None],
    config_name: str = "train",
    schema: type[RunConfig] = RunConfig,
) -> None:
    """Runs `job` under Hydra, once or once per job of a sweep, and exits with its code.

    A wrong command is answered before Hydra makes a folder: it is composed and checked here
    first. Only rank 0 keeps Hydra's files and log.

    Args:
        schema: of the run; a verb's own keys are in a class that inherits from it.
    """
    register(schema)
    args = get_args_parser().parse_args()
    if args.help:
        print(help_text())
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us, instead of Hydra's own report
    if this_process().rank > 0:
        sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=disabled"]
    try:
        overrides = _take_old_run(args.overrides, config_name)
        if not (args.cfg or args.info or args.shell_completion or args.multirun):
            check(compose_command(overrides, config_name))
        hydra_main(config_path=CONF, config_name=config_name, version_base="1.3")(job)()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)


def compose_command(overrides: list[str], config_name: str = "train") -> DictConfig:
    """The config that these overrides compose, those of from_run first, without Hydra's node."""
    with initialize_config_dir(CONF, version_base="1.3"):
        overrides = expand(overrides, lambda old: compose(config_name, overrides=old))
        return compose(config_name, overrides=overrides)


def _take_old_run(typed: list[str], config_name: str) -> list[str]:
    """The overrides with those of from_run; Hydra, which reads sys.argv, is shown them too."""
    with initialize_config_dir(CONF, version_base="1.3"):
        overrides = expand(typed, lambda old: compose(config_name, overrides=old))
    if overrides != typed:
        flags = [word for word in sys.argv if word not in typed]
        first = min(sys.argv.index(word) for word in typed)
        sys.argv = flags[:first] + overrides + flags[first:]
    return overrides

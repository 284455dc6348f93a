"""From the command line to the job: compose, check, and only then let Hydra write anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from gptrain.config.check import check
from gptrain.config.help import help_text
from gptrain.config.problems import ConfigError
from gptrain.config.process import this_process
from gptrain.config.schema import PROJECT, register

CONF = str(PROJECT / "conf")


def main(job: Callable[[DictConfig], float | None], config_name: str = "train") -> None:
    """Runs `job` under Hydra, once or once per job of a sweep, and exits with its code.

    A wrong command is answered before Hydra makes a folder: it is composed and checked here
    first. Only rank 0 keeps Hydra's files and log.
    """
    register()
    args = get_args_parser().parse_args()
    if args.help:
        print(help_text())
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us, instead of Hydra's own report
    if this_process().rank > 0:
        sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=disabled"]
    try:
        if not (args.cfg or args.info or args.shell_completion or args.multirun):
            check(compose_command(args.overrides, config_name))
        hydra_main(config_path=CONF, config_name=config_name, version_base="1.3")(job)()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)


def compose_command(overrides: list[str], config_name: str = "train") -> DictConfig:
    """The config that these overrides compose, without Hydra's own node."""
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose(config_name, overrides=overrides)

"""From the command line to the job: compose, check, and only then let Hydra write anything."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gptrain.config.check import check_config
from gptrain.config.compose import (
    CONF,
    REFUSALS,
    Place,
    compose_and_explain,
    compose_config,
    parse,
)
from gptrain.config.from_run import expand
from gptrain.config.preflight import check_machine, check_place
from gptrain.config.schema import Run
from gptrain.launch.process import calm_threads, this_process
from gptrain.problems import (
    BAD_CONFIG,
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    ConfigError,
    JobFailed,
    Problem,
    code_of,
    first_line,
)

LINGER_S = 10.0  # ranks start within seconds of each other
STOPPED = (PREEMPTED, INTERRUPTED)  # the user or the scheduler wants all to end, not one job
HYDRAS_OWN = ("BasicSweeper", "BasicLauncher")  # jobs of this process, none of which is a trial
Job = Callable[[DictConfig], "float | None"]


class SweepStopped(BaseException):
    """Ends a sweep at once; Hydra, which keeps exceptions of jobs, lets it pass."""


@dataclass
class Outcome:
    """What became of a job that was started."""

    overrides: list[str]
    code: int = DONE
    said: str = "done"


def main(
    job: Job, schema: type[Run] = Run, defaults: Mapping[str, Any] | None = None, usage: str = ""
) -> NoReturn:
    """Runs `job` under Hydra, once or once per job of a sweep, and exits with its code.

    A wrong command is answered before Hydra makes a folder: it is composed and checked here
    first. Only rank 0 speaks, and keeps Hydra's files and log.

    Args:
        schema: of the run; a command's own keys are in a class that inherits from it.
        defaults: of those keys.   usage: with which --help begins.
    """
    calm_threads()
    code = run_command(job, sys.argv[1:], schema, defaults, usage)
    if code == BAD_CONFIG and _rank() > 0:
        time.sleep(LINGER_S)  # a launcher that sees this rank fail ends rank 0, which has to speak
    sys.exit(code)


def run_command(
    job: Job,
    argv: list[str],
    schema: type[Run] = Run,
    defaults: Mapping[str, Any] | None = None,
    usage: str = "",
) -> int:
    """The exit code of a command line, after it has run or was refused."""
    try:
        args = parse_command(argv)
        if args.help:
            print(help_text(usage))
            return DONE
        place = Place(args.config_name or "train", args.config_dir)
        own = [f"+{key}={value}" for key, value in (defaults or {}).items()]
        overrides = [*own, *expand(args.overrides, place)]
        is_sweep = args.multirun or "hydra.mode=multirun" in map(str.lower, overrides)
        if is_sweep or args.cfg or args.info:
            check_sweep(overrides, place)
        else:
            check_command(overrides, schema, place)
    except ConfigError as error:
        _tell([problem.line for problem in error.problems])
        return error.code
    except REFUSALS as error:
        _tell([Problem("", None, first_line(error)).line])
        return BAD_CONFIG
    named = {"config-dir": args.config_dir, "cfg": args.cfg, "info": args.info}
    flags = [f"--{name}={value}" for name, value in named.items() if value]
    flags += ["--multirun"] if is_sweep else []
    return _run(job, [*flags, *overrides, *_quiet_rank()], place, schema, is_sweep)


def check(cfg: DictConfig, schema: type[Run] = Run) -> list[Problem]:
    """The warnings of a composed config that can run.

    Raises: ConfigError with every problem.
    """
    run = check_config(cfg, schema)
    if schema.runs_here:
        run.add(check_place(run, _find_folder(cfg)))
        if not run.errors:  # torch is worth it now
            run.add(check_machine(run))
    if run.errors:
        raise ConfigError(run.problems)
    return run.problems


def check_command(overrides: list[str], schema: type[Run], place: Place) -> None:
    """Composes and checks a command, and prints its warnings. Raises: ConfigError."""
    cfg, problems = compose_and_explain(overrides, place)
    HydraConfig.instance().set_config(cfg)  # for references to Hydra's own node
    try:
        problems += check_config(cfg, schema).problems if problems else check(cfg, schema)
    except ConfigError as error:
        problems += error.problems
    if any(problem.code for problem in problems):
        raise ConfigError(problems)
    _tell([problem.line for problem in problems])


def check_sweep(overrides: list[str], place: Place) -> None:
    """Composes the first job of a sweep; each is checked as it starts. Raises: ConfigError."""
    parsed, problems = parse(overrides)
    if this_process().launcher in ("torchrun", "slurm"):
        wrong = "a sweep cannot run inside the ranks of a launcher"
        attempt = "python train.py -m ... trainer.devices=<n>"
        problems.append(Problem("-m", None, wrong, attempt=attempt))
    problems += compose_and_explain([_first_value(one) for one in parsed], place)[1]
    if problems:
        raise ConfigError(problems)


def parse_command(argv: list[str]) -> argparse.Namespace:
    """Flags and overrides, in any order. Raises: ConfigError for a flag that does not exist."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for flag in ("--help", "-h"), ("--multirun", "-m"):
        parser.add_argument(*flag, action="store_true")
    for flag in (
        ("--config-dir", "-cd"),
        ("--config-name", "-cn"),
        ("--cfg", "-c"),
        ("--info", "-i"),
    ):
        parser.add_argument(*flag)
    args = parser.parse_intermixed_args(argv)
    if args.config_dir and not os.path.isdir(args.config_dir):
        raise ConfigError([Problem("--config-dir", args.config_dir, "no such folder")])
    return args


def compose_command(overrides: list[str]) -> DictConfig:
    """The config that these overrides compose, those of from_run first, without Hydra's node.

    Raises: ConfigError, or what Hydra raises.
    """
    cfg = compose_config(expand(overrides))
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def help_text(usage: str) -> str:
    """What to type, every choice of every group, and where the keys are."""
    choices = ""
    for group in sorted({file.parent for file in Path(CONF).glob("*/*.yaml")}):
        names = " ".join(sorted(file.stem for file in group.glob("*.yaml")))
        choices += f"  {group.name:17}{names}\n"
    return f"""{usage.strip()}

{choices}  hydra/launcher   basic submitit_local submitit_slurm

  --cfg job        shows the composed config         -m           runs a sweep
  --info defaults  shows how it was composed         debug=true   shows tracebacks
  conf/            every key with its default, of the types in src/gptrain/config/schema.py"""


def table(outcomes: list[Outcome]) -> list[str]:
    """A line per job: its number, what happened, and its overrides."""
    lines = ["job  ended  overrides"]
    for number, one in enumerate(outcomes):
        end = f"failed ({one.code}): {one.said}" if one.code else one.said
        lines.append(f"{number:3}  {end}  {' '.join(one.overrides)}")
    return lines


def _run(job: Job, argv: list[str], place: Place, schema: type[Run], is_sweep: bool) -> int:
    """Lets Hydra run the job or the jobs; the code of the first that failed."""
    outcomes: list[Outcome] = []

    def attempt(cfg: DictConfig) -> float | None:
        """Runs one job; what it raises is kept for the end, so that it ends no other job."""
        node = HydraConfig.get()
        outcome = Outcome(list(node.overrides.task))
        outcomes.append(outcome)
        try:
            if is_sweep:
                _tell([problem.line for problem in check(cfg, schema)])
            value = job(cfg)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, ConfigError) and _rank() == 0:
                with suppress(OSError):  # somebody's files are there
                    Path(node.runtime.output_dir).rmdir()  # Hydra has made it
            outcome.code, outcome.said = _ending(error, bool(cfg.get("debug")))
            if is_sweep and outcome.code in STOPPED:
                raise SweepStopped from error
            parts = (node.sweeper["_target_"], node.launcher["_target_"])
            if is_sweep and not all(map(str.endswith, parts, HYDRAS_OWN)):
                raise JobFailed(outcome.code, outcome.said) from error  # a search must know
            return None
        if value is not None:
            outcome.said = f"{cfg.get('objective')} {value:g}"
        return value

    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us, instead of Hydra's own report
    typed, sys.argv = sys.argv, [sys.argv[0], *argv]
    code = DONE
    try:
        hydra.main(CONF, place.config_name, "1.3")(attempt)()
    except SweepStopped:
        pass
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if not any(outcome.code for outcome in outcomes):
            code = _ending(error, debug=False)[0]  # of Hydra itself
    finally:
        sys.argv = typed
    failed = [outcome.code for outcome in outcomes if outcome.code]
    if is_sweep and outcomes and (failed or code):
        _tell(table(outcomes))
    return code or (failed[0] if failed else DONE)


def _ending(error: BaseException, debug: bool) -> tuple[int, str]:
    """Code and reason of what a job raised, after it was printed, if nobody has done so yet."""
    if debug and not isinstance(error, JobFailed):
        traceback.print_exception(error)
    if isinstance(error, JobFailed):
        return error.code, first_line(error)
    if isinstance(error, ConfigError):
        _tell([problem.line for problem in error.problems])
        return error.code, str(error.problems[0])
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):
        code = error.code or DONE if not isinstance(error.code, str) else FAILED
        return code, f"exit {code}" if code else "done"
    if isinstance(error, HydraException | OmegaConfBaseException):
        _tell([Problem("", None, first_line(error)).line])
        return BAD_CONFIG, first_line(error)
    wrong = f"{type(error).__name__}: {first_line(error)}"
    _tell([Problem("", None, wrong, attempt="debug=true").line])
    return code_of(error) if isinstance(error, OSError) else FAILED, first_line(error)


def _find_folder(cfg: DictConfig) -> tuple[str, str]:
    """The key that names the run folder, and the folder."""
    if "hydra" in cfg:  # before Hydra has made it
        chosen = OmegaConf.select(cfg, "hydra.run.dir", throw_on_resolution_failure=False)
        is_run_dir = chosen == OmegaConf.select(cfg, "run_dir", throw_on_resolution_failure=False)
        return "run_dir" if is_run_dir else "hydra.run.dir", str(chosen)
    node = HydraConfig.instance().cfg
    folder = OmegaConf.select(node, "hydra.runtime.output_dir", default=None) if node else None
    return "run_dir", str(folder or cfg.run_dir)


def _first_value(one: Override) -> str:
    """An override of a sweep with the first of its values."""
    if not one.is_sweep_override():
        return one.input_line
    sweep = one.value()
    first = sweep.start if isinstance(sweep, IntervalSweep) else next(one.sweep_string_iterator())
    return f"{one.input_line.partition('=')[0]}={first}"


def _quiet_rank() -> list[str]:
    return [] if _rank() == 0 else ["++hydra.job_logging.root={level:ERROR,handlers:[]}"]


def _tell(lines: list[str]) -> None:
    """Prints on stderr, once per job and not once per rank."""
    if lines and _rank() == 0:
        print("\n".join(dict.fromkeys(lines)), file=sys.stderr, flush=True)


def _rank() -> int:
    """This process's rank; 0 where the launcher's environment cannot be read, which is told."""
    try:
        return this_process().rank
    except (ValueError, KeyError):
        return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem("", None, message, attempt="python train.py --help")])

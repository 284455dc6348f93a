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
from omegaconf import DictConfig, OmegaConf, open_dict

from gptrain.config.check import check_config
from gptrain.config.compose import (
    CONF,
    PROJECT,
    REFUSALS,
    Place,
    compose_config,
    compose_or_explain,
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
    FOLDER_UNUSABLE,
    INTERRUPTED,
    PREEMPTED,
    ConfigError,
    JobFailed,
    Problem,
    code_of,
)

LINGER_S = 10.0  # ranks start within seconds of each other
STOPPED = (PREEMPTED, INTERRUPTED)  # the user or the scheduler wants all to end, not one job
BASIC = ("BasicSweeper", "BasicLauncher")
SHOW = ("cfg", "info", "package", "shell_completion")  # Hydra's own flags, with and without a value
SHOW_ALONE = ("resolve", "hydra_help", "version")
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
        defaults: of those keys.   usage: what --help prints; empty: that of a training run.
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
    told: list[str] = []
    try:
        args = parse_command(argv)
        if args.help:
            print(usage or help_text())
            return DONE
        place = find_place(args)
        own = [f"+{key}={value}" for key, value in (defaults or {}).items()]
        overrides = [*own, *expand(args.overrides, place)]
        flags = [f"--{name.replace('_', '-')}" for name in SHOW_ALONE if getattr(args, name)]
        for name in SHOW:
            value = getattr(args, name)
            flags += [f"--{name.replace('_', '-')}", value] if value else []
        if flags:
            compose_or_explain(overrides, place)
            return _hydra(lambda cfg: None, [*flags, *_place_flags(args), *overrides], place)
        is_sweep = args.multirun or "hydra.mode=multirun" in [word.lower() for word in overrides]
        if is_sweep:
            check_sweep(overrides, place)
        else:
            told = check_command(overrides, schema, place)
    except ConfigError as error:
        _tell([problem.line for problem in error.problems])
        return error.code
    except BrokenPipeError:
        raise
    except REFUSALS as error:
        _tell([Problem("", None, f"{_first(error)}").line])
        return BAD_CONFIG
    words = [*(["--multirun"] if is_sweep else []), *_place_flags(args), *overrides, *_quiet_rank()]
    return _run(job, words, place, schema, is_sweep, told)


def check(cfg: DictConfig, schema: type[Run] = Run) -> list[Problem]:
    """The warnings of a composed config that can run.

    Raises: ConfigError with every problem.
    """
    run = check_config(cfg, schema)
    if schema.runs_here:
        check_place(run, _find_folder(cfg, run.wrong))
        if not run.errors:  # torch is worth it now
            check_machine(run)
    if run.errors:
        raise ConfigError(run.problems)
    return run.problems


def check_command(overrides: list[str], schema: type[Run], place: Place) -> list[str]:
    """Composes and checks a command, whose warnings are printed and returned.

    Raises: ConfigError.
    """
    broken: list[Problem] = []
    try:
        cfg = compose_or_explain(overrides, place)
    except ConfigError as error:
        broken = error.problems
        named = {problem.key for problem in broken}
        sound = [one.input_line for one in _readable(overrides) if one.key_or_group not in named]
        try:
            cfg = compose_config(sound, place)
        except REFUSALS:
            raise error from None
    HydraConfig.instance().set_config(cfg)  # for references to hydra's own node
    try:
        found = check_config(cfg, schema).problems if broken else check(cfg, schema)
    except ConfigError as error:
        found = error.problems
    problems = list(dict.fromkeys([*broken, *found]))
    if any(problem.code for problem in problems):
        raise ConfigError(problems)
    lines = [problem.line for problem in problems]
    _tell(lines)
    return lines


def check_sweep(overrides: list[str], place: Place) -> None:
    """Composes the first job of a sweep; each job is checked as it starts.

    Raises: ConfigError.
    """
    if this_process().launcher in ("torchrun", "slurm"):
        attempt = "python train.py -m ... trainer.devices=<n>"
        wrong = "a sweep cannot run inside the ranks of a launcher"
        raise ConfigError([Problem("-m", None, wrong, attempt=attempt)])
    compose_or_explain([_first_value(one) for one in parse(overrides)], place)


def parse_command(argv: list[str]) -> argparse.Namespace:
    """Hydra's flags and the overrides, in any order.

    Raises: ConfigError for a flag that does not exist.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for flag in ("--help", "-h"), ("--multirun", "-m"), ("--run",), ("--resolve",), ("--version",):
        parser.add_argument(*flag, action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    for flag in ("--config-dir", "-cd"), ("--config-name", "-cn"), ("--config-path", "-cp"):
        parser.add_argument(*flag)
    for flag in ("--cfg", "-c"), ("--info", "-i"), ("--package", "-p"):
        parser.add_argument(*flag, nargs="?", const="all")
    parser.add_argument("--shell-completion", "-sc")
    return parser.parse_intermixed_args(argv)


def find_place(args: argparse.Namespace) -> Place:
    """Where Hydra's flags say that configs are. Raises: ConfigError."""
    path = str(PROJECT / args.config_path) if args.config_path else CONF
    name = args.config_name or "train"
    for flag, folder in (("--config-dir", args.config_dir), ("--config-path", path)):
        if folder is not None and not os.path.isdir(folder):
            raise ConfigError([Problem(flag, folder, "no such folder")])
    known = sorted(file.stem for file in Path(path).glob("*.yaml") if file.stem != "schema")
    if name.removesuffix(".yaml") not in known:
        raise ConfigError([Problem("--config-name", name, "no such config", ", ".join(known))])
    return Place(path, name, args.config_dir)


def help_text() -> str:
    """What to type, every choice of every group, and where the keys are."""
    groups = sorted(folder for folder in Path(CONF).iterdir() if list(folder.glob("*.yaml")))
    choices = "\n".join(
        f"  {group.name:17}{' '.join(sorted(file.stem for file in group.glob('*.yaml')))}"
        for group in groups
    )
    return f"""python train.py [group=choice ...] [key=value ...]     trains a language model

{choices}
  hydra/launcher   basic submitit_local submitit_slurm

  python train.py experiment=quickstart                 a small GPT on real text, a minute on a CPU
  python train.py trainer.devices=4                     four devices (strategy=auto takes ddp)
  python train.py strategy=fsdp trainer.devices=8       weights and optimizer sharded across eight
  python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2    a sweep: every combination, one by one
  python train.py trainer.fast_dev_run=true             one batch through every part, nothing kept
  python train.py run_dir=outputs/a ckpt_path=last      go on with the run in outputs/a

  --cfg job        shows the composed config         -m           runs a sweep
  --info defaults  shows how it was composed         debug=true   shows tracebacks
  conf/            every key with its default        src/gptrain/config/schema.py   their types"""


def _run(
    job: Job, words: list[str], place: Place, schema: type[Run], is_sweep: bool, told: list[str]
) -> int:
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
            outcome.code, outcome.said = _ending(error, bool(cfg.get("debug")), told)
            if is_sweep and outcome.code in STOPPED:
                raise SweepStopped from error
            makers = (node.sweeper["_target_"], node.launcher["_target_"])
            if is_sweep and not all(map(str.endswith, makers, BASIC)):
                raise JobFailed(outcome.code, outcome.said) from error  # a search must know
            return None
        if value is not None:
            outcome.said = f"{cfg.get('objective')} {value:g}"
        return value

    code = _hydra(attempt, words, place, outcomes)
    failed = [outcome.code for outcome in outcomes if outcome.code]
    if is_sweep and outcomes and (failed or code):
        _tell(table(outcomes))
    return code or (failed[0] if failed else DONE)


def _hydra(task: Job, words: list[str], place: Place, outcomes: list[Outcome] | None = None) -> int:
    """Hydra's own main; the code of what ended it, where no job has one."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us, instead of Hydra's own report
    before, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        hydra.main(
            version_base="1.3", config_path=place.config_path, config_name=place.config_name
        )(task)()
    except SweepStopped:
        pass
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE
    except Exception as error:
        if outcomes:
            return (
                DONE if any(outcome.code for outcome in outcomes) else _ending(error, False, [])[0]
            )
        if isinstance(error, OSError):  # the folder, which Hydra makes before the job
            _tell(
                [Problem("run_dir", error.filename, str(error.strerror), code=FOLDER_UNUSABLE).line]
            )
            return FOLDER_UNUSABLE
        _tell([Problem("", None, _first(error)).line])
        return BAD_CONFIG
    finally:
        sys.argv = before
    return DONE


def _ending(error: BaseException, debug: bool, told: list[str]) -> tuple[int, str]:
    """Code and reason of what a job raised, after it was printed, if nobody has done so yet."""
    if debug and not isinstance(error, JobFailed):
        traceback.print_exception(error)
    if isinstance(error, JobFailed):
        return error.code, _first(error)
    if isinstance(error, ConfigError):
        _tell([problem.line for problem in error.problems if problem.line not in told])
        return error.code, str(error.problems[0])
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):
        code = error.code or DONE if not isinstance(error.code, str) else FAILED
        return code, f"exit {code}" if code else "done"
    wrong = f"{type(error).__name__}: {_first(error)}"
    _tell([Problem("", None, wrong, attempt="debug=true").line])
    return code_of(error) if isinstance(error, OSError) else FAILED, _first(error)


def table(outcomes: list[Outcome]) -> list[str]:
    """A line per job: its number, what happened, and its overrides."""
    ends = [one.said if one.code == DONE else f"failed ({one.code})" for one in outcomes]
    width = max(map(len, ends))
    return [
        f"{'job':>3}  {'ended':{width}}  overrides",
        *(
            f"{i:>3}  {end:{width}}  {' '.join(one.overrides)}"
            + (f"  {one.said}" if one.code else "")
            for i, (end, one) in enumerate(zip(ends, outcomes, strict=True))
        ),
    ]


def compose_command(overrides: list[str]) -> DictConfig:
    """The config that these overrides compose, those of from_run first, without Hydra's node.

    Raises: ConfigError, or what Hydra raises.
    """
    cfg = compose_config(expand(overrides))
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def _find_folder(cfg: DictConfig, wrong: set[str]) -> tuple[str, str] | None:
    """(key, folder) that the job will write into; None where that is not known."""
    node = cfg.get("hydra") or (HydraConfig.instance().cfg or {}).get("hydra")
    if wrong & {"run_dir", "output_dir", "name"}:
        return None
    folder = str(cfg.run_dir)
    if "hydra" not in cfg:
        is_job = node is not None and not OmegaConf.is_missing(node.runtime, "output_dir")
        return ("run_dir", str(node.runtime.output_dir)) if is_job else ("run_dir", folder)
    chosen = str(node.run.dir)
    return ("run_dir", folder) if chosen == folder else ("hydra.run.dir", chosen)


def _first_value(one: Override) -> str:
    """An override of a sweep with the first of its values."""
    if not one.is_sweep_override():
        return one.input_line
    sweep = one.value()
    first = sweep.start if isinstance(sweep, IntervalSweep) else next(one.sweep_string_iterator())
    return f"{one.input_line.partition('=')[0]}={first}"


def _readable(overrides: list[str]) -> list[Override]:
    found = []
    for line in overrides:
        with suppress(ConfigError):
            found += parse([line])
    return [one for one in found if not one.is_sweep_override()]


def _place_flags(args: argparse.Namespace) -> list[str]:
    return ["--config-dir", args.config_dir] if args.config_dir else []


def _quiet_rank() -> list[str]:
    return [] if _rank() == 0 else ["++hydra.job_logging.root={level:ERROR,handlers:[]}"]


def _tell(lines: list[str]) -> None:
    """Prints on stderr, once per job and not once per rank."""
    if lines and _rank() == 0:
        print("\n".join(lines), file=sys.stderr, flush=True)


def _rank() -> int:
    """This process's rank; 0 where the launcher's environment cannot be read, which is told."""
    try:
        return this_process().rank
    except (ValueError, KeyError):
        return 0


def _first(error: BaseException) -> str:
    """The first line of a message, and the next where the first only says where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem("", None, message, attempt="python train.py --help")])

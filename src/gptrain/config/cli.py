"""From the command line to the job: compose, check, and only then let Hydra write anything."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from gptrain.config.compose import CONF, REFUSALS, Composer
from gptrain.config.examine import Answer, composer_of, examine, parse_command, with_old_run
from gptrain.config.from_run import expand
from gptrain.config.help import help_text
from gptrain.config.schema import RunConfig, register
from gptrain.config.sweep import BASIC_LAUNCHER, BASIC_SWEEPER, Outcome, table
from gptrain.launch.process import this_process
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
)

__all__ = ["CONF", "compose_command", "main", "register"]

LINGER_S = 10.0  # ranks start within seconds of each other
STOPPED = (PREEMPTED, INTERRUPTED)  # the user or the scheduler wants all to end, not one job
Job = Callable[[DictConfig], "float | None"]


class SweepStopped(BaseException):
    """Ends a sweep at once; Hydra, which keeps exceptions of jobs, lets it pass."""


def main(job: Job, schema: type[RunConfig] = RunConfig, usage: str | None = None) -> None:
    """Runs `job` under Hydra, once or once per job of a sweep, and exits with its code.

    A wrong command is answered before Hydra makes a folder: it is composed and checked here
    first. Only rank 0 speaks, and keeps Hydra's files and log.

    Args:
        schema: of the run; a verb's own keys are in a class that inherits from it.
        usage: what --help prints; None: that of a training run.
    """
    code = run_command(job, sys.argv[1:], schema, usage)
    if code == BAD_CONFIG and _rank() > 0:
        time.sleep(LINGER_S)  # a launcher that sees this rank fail ends rank 0, which has to speak
    sys.exit(code)


def run_command(
    job: Job, words: list[str], schema: type[RunConfig] = RunConfig, usage: str | None = None
) -> int:
    """The exit code of a command line, after it has run or was refused."""
    register(schema)
    try:
        args = parse_command(words)
        if args.help:
            with _until_the_reader_leaves():
                print(usage or help_text())
            return DONE
        composer = composer_of(args)
        if args.cfg or args.info or args.shell_completion or args.hydra_help:
            with _until_the_reader_leaves():
                return _show(args, composer)
        answer = examine(args, composer)
    except ConfigError as error:
        answer = Answer(words, error.problems, code=error.code)
    _tell(answer.lines)
    if answer.code:
        if answer.debug:
            _tell(["".join(traceback.format_stack())])
        return answer.code
    return _run(job, args, answer, composer)


def compose_command(overrides: list[str]) -> DictConfig:
    """The config that these overrides compose, those of from_run first, without Hydra's node.

    Raises: what Hydra raises.
    """
    composer = Composer()
    cfg = composer.compose_all(expand(overrides, composer.compose_all))
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    OmegaConf.set_struct(cfg, True)
    return cfg


@contextmanager
def _until_the_reader_leaves() -> Iterator[None]:
    """Ends this process without a word where `| head` has read enough, as other tools do."""
    if threading.current_thread() is not threading.main_thread():  # only it may set a signal
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)


def _show(args: argparse.Namespace, composer: Composer) -> int:
    """--cfg, --info and the like: Hydra's own, with our words for what cannot be composed."""
    try:
        args.overrides = with_old_run(args.overrides, composer)
        _hydra(lambda cfg: None, args, composer)
    except ConfigError as error:
        _tell([problem.line for problem in error.problems])
        return error.code
    except REFUSALS as error:
        problems = composer.compose(args.overrides).problems
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        _tell([problem.line for problem in problems] or [Problem("", None, said).line])
        return BAD_CONFIG
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE
    return DONE


def _run(job: Job, args: argparse.Namespace, answer: Answer, composer: Composer) -> int:
    """Lets Hydra run the job or the jobs; the code of the first that failed."""
    outcomes: list[Outcome] = []
    args.overrides = list(answer.overrides)
    args.overrides += _quiet_rank()
    args.multirun = args.multirun or bool(answer.jobs)
    code = DONE
    Hydra.get_mode = lambda *_, **__: answer.mode  # Hydra would compose everything once more for it
    try:
        _hydra(functools.partial(_attempt, job, outcomes, answer.lines), args, composer)
    except SweepStopped:
        pass
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        if not any(outcome.code for outcome in outcomes):
            code = _end_of(error, answer.debug).code
    failed = [outcome.code for outcome in outcomes if outcome.code]
    if args.multirun and outcomes and (failed or code):
        _tell(table(outcomes))
    return code or (failed[0] if failed else DONE)


def _attempt(job: Job, outcomes: list[Outcome], told: list[str], cfg: DictConfig) -> float | None:
    """Runs one job; what it raises is kept for the end, so that it ends no other job."""
    hydra = HydraConfig.get()
    outcome = Outcome(list(hydra.overrides.task))
    outcomes.append(outcome)
    is_sweep = hydra.mode == RunMode.MULTIRUN
    try:
        value = job(cfg)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        ended = _end_of(error, bool(cfg.get("debug")), told)
        outcome.code, outcome.said = ended.code, ended.said
        if is_sweep and outcome.code in STOPPED:
            raise SweepStopped from error
        ours = (
            hydra.sweeper.get("_target_") == BASIC_SWEEPER
            and hydra.launcher.get("_target_") == BASIC_LAUNCHER
        )
        if is_sweep and not ours:  # a search must know that the trial failed
            raise JobFailed(outcome.code, outcome.said) from error
        return None
    if value is not None:
        outcome.said = f"{cfg.get('objective')} {value:g}"
    return value


def _end_of(error: BaseException, debug: bool, told: list[str] = ()) -> Outcome:
    """The code of what a job raised, after it was printed, if nobody has done so yet."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if debug and not isinstance(error, JobFailed):
        traceback.print_exception(error)
    if isinstance(error, JobFailed):
        return Outcome([], error.code, said)
    if isinstance(error, ConfigError):
        _tell([problem.line for problem in error.problems if problem.line not in told])
        return Outcome([], error.code, str(error.problems[0]))
    if isinstance(error, KeyboardInterrupt):
        return Outcome([], INTERRUPTED, "interrupted")
    if isinstance(error, SystemExit):
        code = error.code or DONE if not isinstance(error.code, str) else FAILED
        return Outcome([], code, f"exit {code}" if code else "done")
    code = code_of(error) if isinstance(error, OSError) else FAILED
    _tell([Problem("", None, f"{type(error).__name__}: {said}", attempt="debug=true").line])
    return Outcome([], code, said)


def _hydra(task: Job, args: argparse.Namespace, composer: Composer) -> None:
    """Hydra's own main, on arguments that are parsed already."""
    version.setbase("1.3")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us, instead of Hydra's own report
    named = functools.wraps(main)(task)  # Hydra asks where a task was defined
    args.config_path = None
    _run_hydra(args, get_args_parser(), named, composer.config_path, composer.config_name)


def _quiet_rank() -> list[str]:
    if _rank() == 0:
        return []
    logs = "hydra.job_logging"  # Hydra's choice "disabled" would be merged with our own handlers
    return [f"~{logs}.handlers.file", f"{logs}.root.handlers=[]", f"{logs}.root.level=ERROR"]


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

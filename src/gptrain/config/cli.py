"""Runs the command line of every command: parses, composes, checks, and starts the job.

Nothing is written before the config was checked. See `main`.
"""

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gptrain.checkpoints.status import write_status
from gptrain.checkpoints.timeline import begin_command
from gptrain.config.check import check_config
from gptrain.config.compose import compose_and_explain, open_hydra, plain, resolved
from gptrain.config.from_run import expand
from gptrain.config.overrides import line_of, parse
from gptrain.config.preflight import check_machine, check_paths
from gptrain.config.sweep import (
    LOG_LEVELS,
    find_finished,
    job_options,
    report_finished,
    report_sweep,
    save_overrides,
)
from gptrain.config.values import check_references, read_config
from gptrain.core import errors, labels, locations, shell
from gptrain.core.errors import ConfigError, ConfigIssue, JobFailedError, ending_of, first_line
from gptrain.core.parser import Parser
from gptrain.core.schema import RunConfig
from gptrain.core.shell import quoted
from gptrain.runtime.process import (
    expand_gpu_segments,
    stop_idle_spinning,
    this_process,
)
from gptrain.runtime.streams import prepare_streams
from gptrain.runtime.unchanged import unchanged_process

# Seconds that a rank other than 0 waits before it exits with an error of the config. All ranks of a
# launcher start within these seconds, so rank 0 can print the error before the launcher kills it.
LINGER_S = 10.0
# Function of the typed config that returns the value of `objective`, if the job has one.
Job = Callable[[Any], "float | None"]


@unchanged_process()
def main(
    job: Job,
    schema: type[RunConfig] = RunConfig,
    defaults: Mapping[str, Any] | None = None,
    usage: str | None = None,
    conf: str | Path | None = None,
) -> NoReturn:
    """Run a job with the command line `sys.argv`, and exit with its exit code.

    The job runs once, or once per job of a sweep, under Hydra. A command whose schema has
    `runs_here=False` runs without Hydra's folder. The config is composed and checked before Hydra
    creates a folder. Only rank 0 prints errors and warnings, and only rank 0 writes Hydra's files
    and its log. After an error of the config, the other ranks exit LINGER_S seconds later.

    Args:
        job: Function that gets the typed config. In a sweep it returns the value of `objective`.
        schema: Type of the config. A command with additional keys passes a subclass of RunConfig.
        defaults: Default values of the additional keys.
        usage: Text with which `--help` begins, usually the docstring of the command's file.
        conf: Path of the project's conf/ folder. None finds the project from the working directory.
    """
    prepare_streams(schema.runs_here)
    stop_idle_spinning()
    expand_gpu_segments()
    locations.enter(conf)
    code = run_command(job, sys.argv[1:], schema, defaults, usage)
    if code == errors.BAD_CONFIG and _rank() > 0:
        time.sleep(LINGER_S)  # a launcher kills rank 0 when another rank exits with an error
    sys.exit(code)


@unchanged_process()
def run_command(
    job: Job,
    argv: list[str],
    schema: type[RunConfig] = RunConfig,
    defaults: Mapping[str, Any] | None = None,
    usage: str | None = None,
) -> int:
    """Run a command line and return its exit code. Errors are printed and not raised.

    What the command changes in this process is restored (`unchanged_process`).

    With `--help` the help is printed, and with `--cfg` the config, and no job runs. At the end of a
    sweep a table of its jobs is printed and written to results.csv.

    Args:
        job: Function that gets the typed config.
        argv: Words of the command line, without the name of the program.
        schema: Type of the config, a subclass of RunConfig for a command with additional keys.
        defaults: Default values of the additional keys.
        usage: Text with which `--help` begins.
    """
    begin_command()
    try:
        args = parse_command(argv)
        if args.help:
            print(help_text(usage))
            return errors.DONE
        check_environment()
        overrides = args.overrides
        if args.config_dir:
            folder = quoted(f"file://{os.path.abspath(args.config_dir)}")
            overrides.insert(0, f"hydra.searchpath=[{folder}]")
        if schema.expands_run:
            overrides = expand(overrides, schema.reads_data)
        overrides = [*(f"+{key}={value}" for key, value in (defaults or {}).items()), *overrides]
        if args.cfg:
            check_sweep(overrides)
            with open_hydra() as hydra:
                hydra.show_cfg("train", overrides, args.cfg, package=None)
            return errors.DONE
        sweep = None
        search_path = []
        if args.multirun:
            parsed, cfg = check_sweep(overrides)
            sweep = Path(cfg.hydra.sweep.dir)
            search_path = [word for word in overrides if word.startswith("hydra.searchpath=")]
            log_levels = [key for key in LOG_LEVELS if OmegaConf.select(cfg, key)]
            overrides += job_options(parsed, log_levels)
        else:
            cfg, problems = compose_and_explain(overrides)
            if cfg.hydra.mode == RunMode.MULTIRUN:
                message = "only -m starts a sweep"
                problems.append(ConfigIssue("hydra.mode", "MULTIRUN", message, hint="-m"))
            HydraConfig.instance().set_config(cfg)  # for references to Hydra's own node
            folder = OmegaConf.select(cfg, "hydra.run.dir", throw_on_resolution_failure=False)
            run, warnings = check(cfg, schema, problems, folder)
            _print(warnings)
            if not schema.runs_here:  # Hydra would create a run folder, so it does not run the job
                job(run)
                return errors.DONE
        if _rank() > 0:
            overrides.append("++hydra.job_logging.root={level:ERROR,handlers:[]}")
        code = _run(job, overrides, schema, sweep, debug=bool(cfg.get("debug")))
        if sweep:
            report_sweep(sweep, search_path)
        return code
    except (Exception, KeyboardInterrupt) as error:
        # The words are read as text, because the config may be impossible to compose.
        debug = shell.by_key(argv).get("debug", "").lower() == "true"
        code, _ = _report(error, debug)
        return code


def check(
    cfg: DictConfig,
    schema: type[RunConfig] = RunConfig,
    known_problems: Sequence[ConfigIssue] = (),
    folder: str | None = None,
) -> tuple[RunConfig, list[str]]:
    """Check a composed config and return the typed config and one line for each warning.

    If `schema.runs_here` is true and there are no known problems, this machine, its folders and its
    input files are checked, too. The check of its classes and devices imports torch and the user's
    modules, and is left out if another check found an error.

    Args:
        cfg: Composed config.
        schema: Type of the config.
        known_problems: Problems that were found while the config was composed.
        folder: Folder into which the job will write. Defaults to `run_dir`.

    Raises:
        ConfigError: If the config or `known_problems` have errors. It contains all of them, and the
            warnings; but if the config cannot be resolved (see `compose.resolved`), only this error
            and the known problems. Also if the environment variables of a launcher are damaged.
    """
    try:
        values = resolved(cfg)
    except ConfigError as error:
        raise ConfigError([*known_problems, *error.problems]) from error
    checked = check_config(values, schema)
    checked.add(check_references(plain(cfg)))
    if schema.runs_here and not known_problems:
        checked.add(check_paths(checked, folder or checked.run.run_dir or ""))
        if not checked.errors:  # check_machine imports torch, which takes seconds
            checked.add(check_machine(checked))
    problems = [*known_problems, *checked.problems]
    if any(problem.code for problem in problems):
        raise ConfigError(problems)
    return checked.run, [problem.line for problem in problems]


def typed_config(cfg: DictConfig, schema: type[RunConfig], folder: str) -> RunConfig:
    """Return the typed config of a job whose config was checked.

    Nothing is checked again.

    Args:
        cfg: Composed config of the job, which is not changed.
        schema: Type of the config.
        folder: Folder that Hydra created for the job. It replaces the value of `run_dir`, also in
            the keys that refer to it: in a sweep each job has a folder of its own. In `output_dir`
            a `~` is replaced by the home folder.

    Raises:
        OmegaConfBaseException, ConfigError: If the config cannot be resolved any more, for example
            because a tokenizer that gives the size of the vocabulary was removed.
    """
    cfg = cfg.copy()
    cfg.run_dir = str(Path(folder))
    cfg.output_dir = str(locations.expand_home(cfg.output_dir))
    run, _ = read_config(plain(cfg, resolve=True), schema)
    return run


def check_environment() -> None:
    """Check the environment variables that gptrain and the launchers set.

    Raises:
        ConfigError: If GPTRAIN_CONF is not a folder, or the variables of a launcher are incomplete,
            not numbers, or contradict each other.
    """
    if (conf := locations.find_conf()) and not conf.is_dir():
        raise ConfigError.of(locations.VARIABLE, conf, "no such folder")
    this_process()


def check_sweep(overrides: list[str]) -> tuple[list[Override], DictConfig]:
    """Return the parsed overrides of a sweep and the composed config of its first job.

    Only the overrides are checked here. The config of each job is checked when the job starts. An
    override `key=glob(...)` is not applied to the config.

    Args:
        overrides: Words of the command line, without flags.

    Raises:
        ConfigError: If an override cannot be parsed or does not fit, or a launcher started this
            process as one of several ranks.
    """
    parsed, unreadable = parse(overrides)
    if this_process().is_rank:
        message = "a sweep cannot run inside the ranks of a launcher"
        hint = f"{shell.train_command('-m')} ... trainer.devices=<n>"
        raise ConfigError.of("-m", None, message, hint=hint)
    # Hydra expands glob(...) when it starts the sweep, so its first value is not known here.
    known = [override for override in parsed if not isinstance(override.value(), Glob)]
    cfg, refused = compose_and_explain([_first_job_override(override) for override in known])
    if unreadable or refused:
        raise ConfigError([*unreadable, *refused])
    return parsed, cfg


def parse_command(argv: list[str]) -> argparse.Namespace:
    """Parse flags and overrides, which may stand in any order.

    Args:
        argv: Words of the command line, without the name of the program.

    Returns:
        A namespace with the list `overrides` and the flags `help`, `multirun`, `config_dir` and
        `cfg`.

    Raises:
        ConfigError: If a flag is unknown, has no value or a wrong one, or if the folder of
            `--config-dir` does not exist. Also if a word ends with a carriage return.
    """
    spec = sys.modules["__main__"].__spec__  # None if the program is a script
    program = ("-m", spec.parent) if spec and spec.parent else (locations.train_script(),)
    parser = Parser(shell.command("python", *program), add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    args = parser.parse_intermixed_args(argv)
    if args.config_dir and not os.path.isdir(args.config_dir):
        raise ConfigError.of("--config-dir", args.config_dir, "no such folder")
    return args


def compose_command(overrides: list[str]) -> DictConfig:
    """Compose and return the config of a command line, without Hydra's own node and without checks.

    Args:
        overrides: Words of the command line. If one is `from_run=<folder>`, the overrides of that
            run come first.

    Raises:
        ConfigError: If the run in `from_run` cannot be read, or has overrides that are refused.
        HydraException: If an override cannot be parsed or does not fit. Other exceptions of
            REFUSALS, such as OmegaConfBaseException, are possible, too.
    """
    lines = expand(overrides)
    with open_hydra():
        return compose("train", lines)


def help_text(usage: str | None) -> str:
    """Return the text of `--help`: usage, all choices of all config groups, and the flags.

    Args:
        usage: First paragraph of the text, or None.
    """
    choices: dict[str, set[str]] = {}
    for conf in filter(None, (locations.find_conf(), locations.LIBRARY / "conf")):
        for file in conf.glob("*/*.yaml"):
            choices.setdefault(file.parent.name, set()).add(file.stem)
    lines = (f"  {group:17}{' '.join(sorted(names))}" for group, names in sorted(choices.items()))
    text = "\n".join(lines)
    return f"""{(usage or "").strip()}

{text}
  hydra/launcher   basic submitit_local submitit_slurm

  --cfg job        shows the composed config         -m           runs a sweep
  debug=true       shows tracebacks
  conf/            your choices and values; those of the library, with every key's default and
                   type, are in conf/ and core/schema.py of {locations.LIBRARY}"""


def _run(
    job: Job, overrides: list[str], schema: type[RunConfig], sweep: Path | None, *, debug: bool
) -> int:
    """Let Hydra run the job, or the jobs of a sweep, and return the first exit code that is not 0.

    Errors are printed and not raised. The result is 0 if no job has failed.

    Args:
        job: Function that gets the typed config.
        overrides: Overrides of the command line.
        schema: Type of the config.
        sweep: Folder of the sweep. None for a single run.
        debug: Whether to print the traceback of an error outside a job (of a sweeper or launcher).
    """
    codes: list[int] = []

    def run_job(cfg: DictConfig) -> float | None:
        """Run one job and return its objective, or None after an error that was printed.

        In a sweep the config is checked here, and a job that has finished in its folder earlier is
        not run again: the objective of its result is returned. After an error Hydra's basic sweeper
        runs its next job. Other sweepers (a search) and launchers (jobs in other processes) need an
        exception to notice the failure. The folder of a job whose config was refused is removed
        if it is empty; in a sweep it then gets the overrides and a status of the refused job.

        Args:
            cfg: Composed config of the job.

        Raises:
            JobFailedError: If a job of a sweep fails, unless both the sweeper and the launcher are
                basic.
            SystemExit: If the job was interrupted or preempted, which ends the sweep.
        """
        node: Any = HydraConfig.get()
        folder = Path(node.runtime.output_dir)
        words: Any = OmegaConf.to_container(node.overrides.task)
        try:
            if sweep:
                begin_command()
                gc.collect()  # frees the net of the previous job, which is part of cycles
                locations.enter()  # the job may run in a process on another machine
                print(labels.line(f"job {node.job.num}", node.job.override_dirname), flush=True)
                if finished := find_finished(folder, words):
                    codes.append(errors.DONE)
                    return report_finished(finished, cfg.objective)
                _, warnings = check(cfg, schema, folder=str(folder))
                _print(warnings)
            value = job(typed_config(cfg, schema, str(folder)))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            code, message = _report(error, bool(cfg.get("debug")))
            codes.append(code)
            if isinstance(error, (ConfigError, ModuleNotFoundError)) and _rank() == 0:
                with suppress(OSError):  # the folder is not empty: keep it
                    folder.rmdir()  # Hydra created the folder for this job
                    if sweep:
                        save_overrides(folder, words)
                        write_status(folder, cause="refused", exit_code=code, message=message)
            if sweep and errors.exit_code(code).ends_sweep:
                raise SystemExit from error  # after an Exception, Hydra would run the next job
            kinds = [part["_target_"].rpartition(".")[2] for part in (node.sweeper, node.launcher)]
            if sweep and code and kinds != ["BasicSweeper", "BasicLauncher"]:
                raise JobFailedError(code, message) from error
            return None
        codes.append(errors.DONE)
        return value

    try:
        with open_hydra() as hydra:  # hydra.main would compose the config a second time
            start = hydra.multirun if sweep else hydra.run
            start("train", run_job, overrides)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if not any(codes):
            code, _ = _report(error, debug)
            codes.append(code)
            if isinstance(error, JobFailedError):  # the job printed the error in another process
                _print([first_line(error)])
    return next(filter(None, codes), errors.DONE)


def _report(error: BaseException, debug: bool = False) -> tuple[int, str]:
    """Print the error of a command or its job, and return its exit code and message.

    No message is printed for a JobFailedError, because the job has printed it, and for a
    SystemExit, which has its own exit code. Every other message is printed on stderr by rank 0, and
    passed to `gptrain.fit` if that started this process.

    Args:
        error: Exception that the command or the job raised.
        debug: Whether to print the traceback, except that of a JobFailedError.
    """
    if isinstance(error, JobFailedError):
        return error.code, str(error)
    if debug:
        traceback.print_exception(error)
    if isinstance(error, SystemExit):
        code = error.code or errors.DONE
        code = code if isinstance(code, int) else errors.FAILED
        return code, f"error: exit code {code}"
    if isinstance(error, (HydraException, OmegaConfBaseException, YAMLError)):
        error = ConfigError.of("", None, first_line(error))
    ending = ending_of(error)
    hint = "; try: debug=true" if ending.trace and not debug else ""
    _print([ending.line + hint])
    locations.report_to_fit(lines=ending.line.splitlines())
    return ending.code, ending.line


def _first_job_override(override: Override) -> str:
    """Return the override that the first job of a sweep gets, such as `lr=1` for `lr=1,2`."""
    if not override.is_sweep_override():
        return line_of(override)
    sweep = override.value()
    is_interval = isinstance(sweep, IntervalSweep)
    first = sweep.start if is_interval else next(override.sweep_string_iterator())
    return f"{line_of(override).partition('=')[0]}={first}"


def _print(lines: Iterable[object]) -> None:
    """Print the lines on stderr without repetitions. Does nothing on ranks other than 0."""
    if _rank() == 0:
        for line in dict.fromkeys(lines):
            print(line, file=sys.stderr, flush=True)


def _rank() -> int:
    """Return the rank of this process, or 0 if the variables of the launcher are damaged.

    `check_environment` reports damaged variables.
    """
    try:
        return this_process().rank
    except ConfigError:
        return 0

"""Runs the command line of every command: parses, composes, checks, and starts the job or a sweep.

Nothing is written before the config was checked. See `main`.
"""

import argparse
import csv
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

from gptrain.checkpoints.status import write_status
from gptrain.config.checks import check
from gptrain.config.compose import compose_words, open_hydra
from gptrain.config.from_run import expand, is_left_out
from gptrain.core import errors, labels, locations, shell
from gptrain.core.errors import ConfigError, JobFailedError, ending_of, first_line
from gptrain.core.schema import RunConfig
from gptrain.core.small_files import flatten
from gptrain.runs import table as runs
from gptrain.runtime.process import CHECKED, adopt_launcher, this_process

# Seconds that a rank other than 0 waits before it exits with an error of the config. All ranks of a
# launcher start within these seconds, so rank 0 can print the error before the launcher kills it.
LINGER_S = 10.0
# Levels of the log on the terminal. In a sweep it has only warnings and one line per job.
LOG_LEVELS = ("hydra.job_logging.handlers.console.level", "hydra.hydra_logging.root.level")
# Function of the typed config that returns the value of `objective`, if the job has one.
Job = Callable[[Any], "float | None"]


def main(
    job: Job,
    schema: type[RunConfig] = RunConfig,
    usage: str | None = None,
    conf: str | Path | None = None,
) -> NoReturn:
    """Run a job with the command line `sys.argv`, and exit with its exit code.

    Args:
        job, schema, usage: Arguments of `run_command`.
        conf: Path of the project's conf/ folder. None finds the project from the working directory.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        # Idle OpenMP threads sleep after 1,000 turns of waiting. On a machine with another busy
        # process, threads that waited actively made a run three times slower (two cores).
        os.environ["GOMP_SPINCOUNT"] = "1000"
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # less memory stays unused
    locations.enter(conf)
    sys.exit(run_command(job, sys.argv[1:], schema, usage))


def run_command(
    job: Job, argv: list[str], schema: type[RunConfig] = RunConfig, usage: str | None = None
) -> int:
    """Run a command line and return its exit code. Errors are printed and not raised.

    The job runs once, or once per job of a sweep. Then the code is that of the first job that has
    failed, or of the one that was asked to stop. Only rank 0 prints errors and warnings.

    Args:
        job: Function that gets the typed config. In a sweep it returns the value of `objective`,
            or None.
        argv: Words of the command line, without the name of the program.
        schema: Type of the config. A command with additional keys passes a subclass of RunConfig,
            in which these keys have their defaults.
        usage: Text with which `--help` begins, usually the docstring of the command's file.
    """
    parser = argparse.ArgumentParser(usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", help="of the config: key=value")
    parser.add_argument("--help", "-h", action="store_true", help="show all choices")
    parser.add_argument("--multirun", "-m", action="store_true", help="run a sweep")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"), help="show the config")
    try:
        adopt_launcher()
        if this_process().rank > 0:
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
        args, unknown = parser.parse_known_intermixed_args(argv)
        if unknown:
            raise ConfigError.of("", None, f"{unknown[0]}: no such flag", hint="--help")
        is_expanded = CHECKED in os.environ or not schema.expands_run
        words = args.overrides if is_expanded else expand(args.overrides)
        # A key of every run has no default here. Hydra reads a value of JSON as the same value.
        added = flatten(schema.model_construct().model_dump())
        words = [*(f"+{key}={json.dumps(value)}" for key, value in added.items()), *words]
        if args.help or args.cfg:
            show(parser, words, args.cfg)
        elif args.multirun:
            run_sweep(job, schema, words)
        else:
            run_once(job, schema, words)
        return errors.DONE
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        # The words are read as text, because the config may be impossible to compose.
        return report(error, shell.by_key(argv).get("debug", "").lower() == "true")


def show(parser: argparse.ArgumentParser, words: list[str], part: str | None) -> None:
    """Print the part job, hydra or all of the config of these overrides, or the help."""
    with open_hydra(words) as hydra:
        if part:
            return hydra.show_cfg("train", words, part, package=None)
        print(parser.format_help())
        for group in sorted(hydra.config_loader.list_groups("")):
            print(f"{group:17}{' '.join(hydra.config_loader.get_group_options(group))}")


def run_once(job: Job, schema: type[RunConfig], words: list[str]) -> None:
    """Compose and check the config of a job, and run the job."""
    cfg = compose_words(words, schema)
    run = check(cfg, schema)
    for key in ("callbacks", "job.chdir"):  # Hydra composes this job and does not run it
        if OmegaConf.select(cfg.hydra, key):
            raise ConfigError.of(f"hydra.{key}", None, "has an effect in a sweep (-m) only")
    os.environ.update(cfg.hydra.job.env_set)
    job(run)


def report(error: BaseException, debug: bool) -> int:
    """Print an exception, also to `gptrain.fit`, and return the exit code of the command."""
    if isinstance(error, JobFailedError):
        return error.code  # the process of the job has printed the message
    if debug:
        traceback.print_exception(error)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else errors.DONE
    ending = ending_of(error)
    locations.report_to_fit(lines=ending.line.splitlines())
    with suppress(ConfigError):  # every rank reports damaged variables of the launcher
        if this_process().rank > 0:
            if ending.code == errors.BAD_CONFIG:
                time.sleep(LINGER_S)  # a launcher kills rank 0 when another rank has failed
            return ending.code
    hint = "; try: debug=true" if ending.trace and not debug else ""
    print(ending.line + hint, file=sys.stderr, flush=True)
    return ending.code


# Sweeps


def run_sweep(job: Job, schema: type[RunConfig], words: list[str]) -> None:
    """Run all jobs of a sweep and report them. After a failure, raise a job's JobFailedError."""
    if this_process().is_rank:
        raise ConfigError.of("-m", None, "not in the ranks of a launcher")
    with open_hydra(words) as hydra:
        parsed = OverridesParser.create(hydra.config_loader).parse_overrides(words)
        first_words = [*map(first_value, parsed)]
    cfg = compose_words(first_words, schema)
    # The folder of a job is named by the keys that the sweep varies.
    keys = [item.key_or_group for item in parsed if not item.is_sweep_override()]
    is_own = OmegaConf.is_interpolation(cfg.checkpoint, "mirror")  # each job has its own folder
    if len(keys) < len(parsed) and not is_own and (mirror := cfg.checkpoint.mirror):
        hint = "checkpoint.mirror=.../${hydra:job.num}"
        raise ConfigError.of("checkpoint.mirror", mirror, "a job would resume another", hint=hint)
    words = [*words, f"hydra.job.config.override_dirname.exclude_keys={keys}"]
    words += [f"{key}=WARNING" for key in LOG_LEVELS if OmegaConf.select(cfg, key)]
    try:
        with open_hydra(words) as hydra:
            hydra.multirun("train", partial(run_job, job, schema), words)
    except JobFailedError as error:
        if error.__cause__ is None:  # it comes from the process of submitit that has run the job
            print(error, file=sys.stderr)
        raise
    finally:
        report_sweep(Path(cfg.hydra.sweep.dir))


def first_value(item: Override) -> str:
    """Return the override that the first job of a sweep gets, such as `lr=1` for `lr=1,2`."""
    if not item.is_sweep_override():
        return item.input_line or ""
    sweep: Any = item.value()
    values = [sweep.start] if isinstance(sweep, IntervalSweep) else item.sweep_string_iterator()
    if (value := next(iter(values), None)) is None:
        raise ConfigError.of("-m", None, f"{item.input_line}: no such choice")
    return f"{item.get_key_element()}={value}"


def run_job(job: Job, schema: type[RunConfig], cfg: DictConfig) -> float | None:
    """Run one job of a sweep and return its objective. A finished job is not run again.

    A job is finished if its folder holds a run that is done, with the same overrides, except those
    that `from_run` leaves out.

    Raises:
        JobFailedError: After an error, which was printed. Hydra raises it again after all jobs.
        SystemExit: After a request to stop, which ends the sweep.
    """
    locations.enter()  # the job may run in a process on another machine
    node: Any = HydraConfig.get()
    folder = Path(node.runtime.output_dir)
    typed: Any = OmegaConf.to_container(node.overrides.task)  # references stay as they are
    print(labels.line(f"job {node.job.num}", node.job.override_dirname), flush=True)
    try:
        for run in runs.read_runs([folder]):  # the folder may be empty
            before = {word for word in run.overrides if not is_left_out(word)}
            if run.is_done and before == {word for word in typed if not is_left_out(word)}:
                text = f"{folder.name}: finished earlier, its result is reused"
                print(labels.line("done", text), flush=True)
                return run.metrics.get(cfg.objective)
        return job(check(cfg, schema))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        code = report(error, bool(cfg.debug))
        if isinstance(error, ConfigError) and not any(folder.iterdir()):
            # Record the refused job, for the table of the sweep.
            (folder / ".hydra").mkdir()
            (folder / ".hydra" / "overrides.yaml").write_text(OmegaConf.to_yaml(typed))
            write_status(folder, cause="refused", exit_code=code, message=first_line(error))
        if code in errors.ENDS_SWEEP:  # after an Exception, Hydra would run the next job
            raise SystemExit(code) from error
        raise JobFailedError(code, first_line(error)) from error


def report_sweep(folder: Path) -> None:
    """Print the table of all jobs, if there are any, and write it to results.csv."""
    if records := runs.read_runs([folder]):
        metric, records = runs.rank_runs(records)
        print(f"\n{runs.text_table(records, metric)}")
        names = sorted({name for record in records for name in record.metrics})
        with open(folder / "results.csv", "w", newline="") as file:
            csv.writer(file).writerows(runs.table(records, names))
        print(labels.line("results", folder / "results.csv"), flush=True)
        best = shell.train_command(shell.override("from_run", records[0].path), "task=test")
        print(labels.line("next", f"test the best job: {best}"), flush=True)

"""From the command line to the job: compose, check, and only then let Hydra write anything."""

from __future__ import annotations

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
from gptrain.config.check import check_config
from gptrain.config.compose import compose_and_explain, line_of, open_hydra, parse, plain
from gptrain.config.from_run import expand
from gptrain.config.preflight import check_machine, check_place
from gptrain.config.study import continue_study
from gptrain.config.sweep import (
    find_finished,
    job_options,
    keep_typed,
    report_finished,
    report_sweep,
)
from gptrain.config.values import read_config
from gptrain.core import errors, labels, locations, shell
from gptrain.core.errors import (
    ConfigError,
    ConfigIssue,
    JobFailedError,
    Parser,
    ending_of,
    first_line,
    quoted,
)
from gptrain.core.schema import RunConfig
from gptrain.runtime.process import reserve_gpus, stop_idle_spinning, this_process
from gptrain.runtime.streams import flush_output, prepare_streams

LINGER_S = 10.0  # ranks start within seconds of each other
Job = Callable[[Any], "float | None"]  # takes the config, of the command's own type


def main(
    job: Job,
    schema: type[RunConfig] = RunConfig,
    defaults: Mapping[str, Any] | None = None,
    usage: str | None = None,
    conf: str | Path | None = None,
) -> NoReturn:
    """Runs `job` under Hydra, once or once per job of a sweep, and exits with its code.

    A wrong command is answered before Hydra makes a folder: it is composed and checked here
    first. Only rank 0 speaks, and keeps Hydra's files and log.

    Args:
        schema: of the run; a command's own keys are in a class that inherits from it.
        defaults: of those keys.   usage: with which --help begins.
        conf: the project's folder of yaml; None: that of the project in which the command is typed.
    """
    prepare_streams(schema.runs_here)
    stop_idle_spinning()
    locations.enter(conf)
    code = run_command(job, sys.argv[1:], schema, defaults, usage)
    output_code = flush_output()
    code = code or output_code
    if code == errors.BAD_CONFIG and _rank() > 0:
        time.sleep(LINGER_S)  # a launcher that sees this rank fail ends rank 0, which has to speak
    sys.exit(code)


def run_command(
    job: Job,
    argv: list[str],
    schema: type[RunConfig] = RunConfig,
    defaults: Mapping[str, Any] | None = None,
    usage: str | None = None,
) -> int:
    """The exit code of a command line, after it has run or was refused."""
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
        sweep, searched = None, []
        if args.multirun:
            parsed, first = check_sweep(overrides)
            sweep = Path(first.hydra.sweep.dir)
            searched = [word for word in overrides if word.startswith("hydra.searchpath=")]
            overrides += [*job_options(parsed, first), *continue_study(first)]
        else:
            cfg, found = first, _ = compose_and_explain(overrides)
            if cfg.hydra.mode == RunMode.MULTIRUN:
                found.append(ConfigIssue("hydra.mode", "MULTIRUN", "no sweep", hint="-m"))
            HydraConfig.instance().set_config(cfg)  # for references to Hydra's own node
            folder = OmegaConf.select(cfg, "hydra.run.dir", throw_on_resolution_failure=False)
            run, warnings = check(cfg, schema, found, folder)
            _print(warnings)
            if not schema.runs_here:  # nor writes: without Hydra, which would make a folder
                job(run)
                return errors.DONE
        if _rank() > 0:
            overrides.append("++hydra.job_logging.root={level:ERROR,handlers:[]}")
        code = _run(job, overrides, schema, sweep, debug=bool(first.get("debug")))
        if sweep:
            report_sweep(sweep, searched)
        return code
    except (Exception, KeyboardInterrupt) as error:
        return _end(error, asks_for_tracebacks(argv))[0]


def asks_for_tracebacks(words: Iterable[str]) -> bool:
    """Return whether the last `debug=...` among the words of a command line is true."""
    pairs = [word.lstrip("+").partition("=") for word in words]
    values = [value.lower() for key, _, value in pairs if key == "debug"]
    return values[-1:] == ["true"]


def check(
    cfg: DictConfig,
    schema: type[RunConfig] = RunConfig,
    found: Sequence[ConfigIssue] = (),
    folder: str | None = None,
) -> tuple[RunConfig, list[str]]:
    """Check a composed config and return it typed, with one line for each warning.

    Args:
        schema: Type of the config.
        found: Problems that are known already.
        folder: Folder of the job. Defaults to its run_dir.

    Raises:
        ConfigError: If the config cannot run, with every problem.
    """
    checked = check_config(cfg, schema)
    if schema.runs_here and checked.values and not found:
        checked.add(check_place(checked, folder or checked.run.run_dir or ""))
        if not checked.errors:  # importing torch is worth its time now
            checked.add(check_machine(checked))
    all_found = [*found, *checked.problems]
    if any(problem.code for problem in all_found):
        raise ConfigError(all_found)
    return checked.run, [problem.line for problem in all_found]


def typed(cfg: DictConfig, schema: type[RunConfig], folder: str) -> RunConfig:
    """Return the typed config of a job that was checked, with the folder that Hydra made for it."""
    run, _ = read_config(plain(cfg, resolve=True), schema)
    return run.changed({"run_dir": str(Path(folder))})


def check_environment() -> None:
    """Raises: ConfigError where variables name no folder, or those of a launcher are no numbers."""
    if (conf := locations.find_conf()) and not conf.is_dir():
        raise ConfigError.of(locations.VARIABLE, conf, "no such folder")
    try:
        this_process()
    except (ValueError, KeyError) as error:
        message = f"the launcher's environment cannot be read: {error}"
        raise ConfigError.of("", None, message) from error


def check_sweep(overrides: list[str]) -> tuple[list[Override], DictConfig]:
    """Overrides, and the config of the first job; each is checked as it starts.

    Raises: ConfigError.
    """
    parsed, unreadable = parse(overrides)
    if this_process().is_rank:
        message = "a sweep cannot run inside the ranks of a launcher"
        attempt = f"{shell.train_command('-m')} ... trainer.devices=<n>"
        raise ConfigError.of("-m", None, message, hint=attempt)
    known = (one for one in parsed if not isinstance(one.value(), Glob))  # which Hydra looks up
    cfg, unfit = compose_and_explain([_first_value(one) for one in known])
    if unreadable or unfit:
        raise ConfigError([*unreadable, *unfit])
    return parsed, cfg


def parse_command(argv: list[str]) -> argparse.Namespace:
    """Flags and overrides, in any order. Raises: ConfigError for a flag that does not exist."""
    spec = sys.modules["__main__"].__spec__  # None of a script
    typed = ("-m", spec.parent) if spec and spec.parent else (locations.train_script(),)
    program = shell.command("python", *typed)
    parser = Parser(program, add_help=False, allow_abbrev=False)
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
    """The config that these overrides compose, those of from_run first, without Hydra's node.

    Raises: ConfigError, or what Hydra raises.
    """
    lines = expand(overrides)
    with open_hydra():
        return compose("train", lines)


def help_text(usage: str | None) -> str:
    """What to type, every choice of every group, and where the keys are."""
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

    Args:
        sweep: Folder of the sweep. None for a single run.
        debug: Whether to print the traceback of an error outside a job (of a sweeper or launcher).
    """
    codes: list[int] = []

    def attempt(cfg: DictConfig) -> float | None:
        """Runs one job; a search, and the launcher of another process, is told of its failure."""
        node: Any = HydraConfig.get()
        try:
            if sweep:
                gc.collect()  # the net of the job before, in cycles that no small collection finds
                locations.enter()  # it may be a process of another machine
                print(labels.line(f"job {node.job.num}", node.job.override_dirname), flush=True)
                if finished := find_finished(node):
                    codes.append(errors.DONE)
                    return report_finished(finished, cfg.objective)
                reserve_gpus(cfg.trainer.devices)
                _print(check(cfg, schema, folder=node.runtime.output_dir)[1])
            value = job(typed(cfg, schema, node.runtime.output_dir))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            code, said = _end(error, bool(cfg.get("debug")))
            codes.append(code)
            if isinstance(error, (ConfigError, ModuleNotFoundError)) and _rank() == 0:
                with suppress(OSError):  # somebody's files are there, or others log into it
                    Path(node.runtime.output_dir).rmdir()  # made by Hydra
                    if sweep:
                        folder = keep_typed(node)
                        write_status(folder, cause="refused", exit_code=code, message=said)
            if sweep and errors.exit_code(code).ends_sweep:
                raise SystemExit from error  # Hydra keeps an Exception, and runs the next job
            kinds = [one["_target_"].rpartition(".")[2] for one in (node.sweeper, node.launcher)]
            if sweep and code and kinds != ["BasicSweeper", "BasicLauncher"]:
                raise JobFailedError(
                    code, said
                ) from error  # a basic sweep would lose the jobs to come
            return None
        codes.append(errors.DONE)
        return value

    try:
        with open_hydra() as hydra:  # not by hydra.main, which composes once more
            (hydra.multirun if sweep else hydra.run)("train", attempt, overrides)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if not any(codes):
            codes.append(_end(error, debug)[0])
            if isinstance(error, JobFailedError):  # it was told in another process
                _print([first_line(error)])
    return next(filter(None, codes), errors.DONE)


def _end(error: BaseException, debug: bool = False) -> tuple[int, str]:
    """Return the exit code and the error message of what a command or its job raised.

    The message of a JobFailedError has been printed already. Every other message is printed on
    stderr,
    and reported to `gptrain.fit` if that started this process.
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


def _first_value(one: Override) -> str:
    """An override of a sweep with the first of its values."""
    if not one.is_sweep_override():
        return line_of(one)
    sweep = one.value()
    first = sweep.start if isinstance(sweep, IntervalSweep) else next(one.sweep_string_iterator())
    return f"{line_of(one).partition('=')[0]}={first}"


def _print(lines: Iterable[object]) -> None:
    """Prints on stderr, once per job and not once per rank."""
    if _rank() == 0:
        for line in dict.fromkeys(lines):
            print(line, file=sys.stderr, flush=True)


def _rank() -> int:
    """This process's rank; 0 where the launcher's environment cannot be read, which is told."""
    try:
        return this_process().rank
    except (ValueError, KeyError):
        return 0

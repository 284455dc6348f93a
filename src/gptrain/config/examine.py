"""What a command line would do: nothing is written or started, everything wrong is told."""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stderr
from dataclasses import dataclass, field

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gptrain.config.checks import find_problems
from gptrain.config.compose import REFUSALS, Composer
from gptrain.config.from_run import expand
from gptrain.config.sweep import Job, expand_sweep
from gptrain.launch.process import this_process
from gptrain.problems import BAD_CONFIG, DONE, ConfigError, Problem


@dataclass
class Answer:
    """What is to be told before anything starts, and whether it may start.

    Attributes:
        overrides: those typed, and before them those of from_run.
        problems: errors and warnings, each once.
        jobs: of a sweep, with what is wrong with each.
        code: 0 where the command may run.
        debug: whether tracebacks were asked for.
        mode: what the config itself says of hydra.mode, of a command that is no sweep.
    """

    overrides: list[str]
    problems: list[Problem] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    code: int = DONE
    debug: bool = False
    mode: RunMode | None = None

    @property
    def lines(self) -> list[str]:
        """What is printed on stderr."""
        return list(dict.fromkeys(problem.line for problem in self.problems))


def parse_command(words: list[str]) -> argparse.Namespace:
    """Hydra's flags and the overrides, in any order.

    Raises: ConfigError for a flag that does not exist.
    """
    parser = get_args_parser()
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            args = parser.parse_intermixed_args(words)
    except SystemExit as end:
        if end.code in (0, None):  # --version
            raise
        reason = said.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise ConfigError([Problem("", None, reason, attempt="python train.py --help")]) from None
    if args.experimental_rerun is not None:
        wrong = "refused: it unpickles a file, which can run anything"
        attempt = "from_run=<folder>"
        raise ConfigError([Problem("--experimental-rerun", None, wrong, attempt=attempt)])
    return args


def composer_of(args: argparse.Namespace) -> Composer:
    """The composer for Hydra's flags --config-name, --config-path and --config-dir.

    Raises: ConfigError for a folder that does not exist.
    """
    composer = Composer(args.config_name or "train")
    if args.config_path is not None:
        composer.config_path = composer.resolve(args.config_path)
    composer.config_dir = args.config_dir
    problems = composer.check_folders()
    if problems:
        raise ConfigError(problems)
    return composer


def examine(args: argparse.Namespace, composer: Composer) -> Answer:
    """Composes and checks a parsed command, all jobs of it."""
    try:
        overrides = with_old_run(args.overrides, composer)
    except ConfigError as error:
        return Answer(args.overrides, error.problems, code=error.code)
    answer = Answer(overrides, debug=any(_is_debug(line) for line in overrides))
    if args.multirun or any(_is_multirun(line) for line in overrides):
        _examine_sweep(answer, composer)
        return answer
    composed = composer.compose(overrides)
    answer.problems = list(composed.problems)
    if composed.cfg is not None:
        answer.mode = composed.cfg.hydra.mode
        answer.problems += check_with_hydra(composed.cfg, bool(composed.problems))
    answer.code = code_of(answer.problems)
    return answer


def check_with_hydra(cfg: DictConfig, cheap: bool = False) -> list[Problem]:
    """Problems of a config with Hydra's node, whose `${hydra:...}` references work meanwhile."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().cfg = cfg
    try:
        return find_problems(cfg, cheap=cheap)
    finally:
        HydraConfig.instance().cfg = before


def code_of(problems: list[Problem]) -> int:
    """The exit code that problems mean; 0 for warnings."""
    errors = [problem for problem in problems if problem.code]
    return ConfigError(errors).code if errors else DONE


def _examine_sweep(answer: Answer, composer: Composer) -> None:
    if this_process().launcher in ("torchrun", "slurm"):
        wrong = "a sweep cannot run inside the ranks of a launcher"
        attempt = "python train.py -m ... trainer.devices=<n>"
        answer.problems.append(Problem("-m", None, wrong, attempt=attempt))
        answer.code = BAD_CONFIG
        return
    answer.jobs, broken = expand_sweep(answer.overrides, composer)
    for job in answer.jobs:
        if job.cfg is not None:
            job.problems += check_with_hydra(job.cfg, bool(job.broken))
    broken += [problem for job in answer.jobs for problem in job.broken]
    every = [problem for job in answer.jobs for problem in [*job.broken, *job.problems]]
    for problem in [*broken, *every]:
        if problem not in answer.problems:
            answer.problems.append(problem)
    wrong = [job for job in answer.jobs if any(problem.code for problem in job.problems)]
    if broken:
        answer.code = code_of(broken)
    elif answer.jobs and len(wrong) == len(answer.jobs):
        answer.code = code_of(answer.problems)
    elif wrong:
        numbers = ", ".join(str(job.number) for job in wrong)
        said = f"of {len(answer.jobs)} jobs these cannot run: {numbers}; the others do"
        answer.problems.append(Problem("-m", None, said, code=DONE))


def with_old_run(typed: list[str], composer: Composer) -> list[str]:
    """The overrides, those of from_run before those typed.

    Raises: ConfigError if that run cannot be read, or does not fit.
    """
    if not any(word.lstrip("+").startswith("from_run=") for word in typed):
        return typed
    try:
        return expand(typed, composer.compose_all)
    except REFUSALS:
        return typed  # told when the words are composed one by one


def _is_debug(line: str) -> bool:
    key, _, value = line.lstrip("+").partition("=")
    return key == "debug" and value.lower() == "true"


def _is_multirun(line: str) -> bool:
    return line.lstrip("+").upper() == "HYDRA.MODE=MULTIRUN"

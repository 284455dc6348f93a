"""The jobs of a sweep: which there are, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf, open_dict

from gptrain.config.checks.values import judge
from gptrain.config.compose import Composer
from gptrain.problems import DONE, Problem

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


@dataclass
class Job:
    """One job of a sweep, before it runs.

    Attributes:
        broken: why it cannot be composed at all.
        problems: what is wrong with its config.
    """

    number: int
    overrides: list[str]
    cfg: DictConfig | None = None
    broken: list[Problem] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass
class Outcome:
    """What became of a job that was started."""

    overrides: list[str]
    code: int = DONE
    said: str = "done"


def expand_sweep(overrides: list[str], composer: Composer) -> tuple[list[Job], list[Problem]]:
    """All jobs that are known beforehand, and what is wrong with the sweep itself.

    A sweeper that draws its values (optuna) makes jobs of its own: then one job stands for all,
    composed of what is fixed.
    """
    composer.many = True
    parsed, problems = composer.parse(overrides)
    if problems:
        return [], problems
    fixed = [one for one in parsed if not one.is_sweep_override()]
    hydra_lines = [one.input_line for one in parsed if one.is_hydra_override()]
    master = composer.compose([one.input_line for one in fixed])
    if master.cfg is None:
        return [], master.problems
    sweeper = master.cfg.hydra.sweeper
    params = OmegaConf.to_container(sweeper.params) if sweeper.get("params") else {}
    if sweeper.get("_target_") != BASIC_SWEEPER:
        extra, problems = composer.parse([f"{key}={value}" for key, value in params.items()])
        for one in [*extra, *parsed]:
            if one.is_sweep_override():
                master.problems += _ends(composer, one)
        return [_job(0, master.overrides, master.cfg, master.problems)], problems
    extra, problems = composer.parse([f"{key}={value}" for key, value in params.items()])
    swept = [*extra, *(one for one in parsed if not one.is_hydra_override())]
    problems += [_drawn(one) for one in swept if _is_drawn(one)]
    if problems:
        return [], problems
    jobs = []
    for number, lines in enumerate(BasicSweeper.split_arguments(swept, None)[0]):
        composed = composer.compose([*hydra_lines, *lines])
        jobs.append(_job(number, lines, composed.cfg, composed.problems))
    return jobs, []


def table(outcomes: list[Outcome]) -> list[str]:
    """A line per job: its number, what happened, and its overrides."""
    rows = [
        (str(i), outcome.said if outcome.code == DONE else f"failed ({outcome.code})", outcome)
        for i, outcome in enumerate(outcomes)
    ]
    width = max(len(row[1]) for row in rows)
    return [
        f"{'job':>3}  {'ended':{width}}  overrides",
        *(
            f"{number:>3}  {said:{width}}  {' '.join(outcome.overrides)}"
            + (f"  {outcome.said}" if outcome.code else "")
            for number, said, outcome in rows
        ),
    ]


def _job(number: int, lines: list[str], cfg: DictConfig | None, broken: list[Problem]) -> Job:
    if cfg is not None:
        with open_dict(cfg):
            cfg.hydra.job.num = number
            cfg.hydra.job.id = str(number)
    return Job(number, lines, cfg, broken)


def _ends(composer: Composer, drawn: Override) -> list[Problem]:
    """Problems of a key that a sweeper sets: unknown, or with an end that it must not have."""
    key, sweep = drawn.key_or_group, drawn.value()
    values = [sweep.start, sweep.end] if isinstance(sweep, IntervalSweep) else sweep.list
    found = composer.compose([f"{key}={values[0]}"]).problems
    problems = [problem for problem in found if "unknown" in problem.wrong]
    for value in values:
        if isinstance(value, int | float) and (wrong := judge(key, value)):
            problems.append(Problem(key, value, *wrong))
    return problems


def _is_drawn(override: Override) -> bool:
    return override.is_sweep_override() and not override.is_discrete_sweep()


def _drawn(override: Override) -> Problem:
    _, _, value = override.input_line.partition("=")
    return Problem(
        override.key_or_group,
        value,
        "Hydra's basic sweeper cannot sample an interval",
        attempt="hparams_search=optuna, or values with commas",
    )

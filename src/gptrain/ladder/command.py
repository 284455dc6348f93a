"""The command: what the ladder takes, its runs, the law through them, and what that says."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import Field, PositiveFloat

from gptrain import config, home
from gptrain import ladder as package
from gptrain.config.compose import plain
from gptrain.config.kinds import SEED_MAX, Closed, Count, Name, between
from gptrain.config.schema import Run
from gptrain.ladder.sizes import Size, compose_size, find_phases, make_size, merged, scaled
from gptrain.plan.__main__ import DEFAULTS as OF_PLAN
from gptrain.plan.__main__ import PlanRun, find_machine
from gptrain.problems import DONE, INPUT_NOT_FOUND, ConfigError, Problem
from gptrain.ranks.process import this_process

DEFAULTS = OF_PLAN | {
    "ladder": "{sizes:[0.2,0.3,0.4,0.5,0.63],target:'',tokens_per_parameter:[5,10,20],seeds:null,"
    "lr_rule:sqrt_width,lr_width:null,count:auto,budget:null,dollars:null,price:null}"
}
OWN = ("ladder.", "hardware", "topology", "run_dir=", "name=")
FEW_STEPS = 100  # a schedule of fewer leaves a loss that no law is about


class Options(Closed):
    sizes: list[Annotated[float, Field(gt=0, le=100)] | Name] = Field(min_length=2)
    target: str
    tokens_per_parameter: list[Annotated[float, Field(ge=0.01)]] = Field(min_length=1)
    seeds: list[Annotated[int, between(0, SEED_MAX)]] | None
    lr_rule: Literal["constant", "sqrt_width", "mup"]
    lr_width: Count | None
    count: Literal["auto", "all", "matrices", "blocks"]
    budget: PositiveFloat | None
    dollars: PositiveFloat | None
    price: PositiveFloat | None


class LadderRun(PlanRun):
    """A plan's keys and the command's own."""

    ladder: Options


class Elsewhere(Run):
    """The keys of a run that needs not fit this machine."""

    runs_here = False


def main() -> None:
    """The command line, in which hardware=… stands for hardware.name."""
    words = [word for word in sys.argv[1:] if word != "--plan"]
    words = [f"hardware.name={w[9:]}" if w.startswith("hardware=") else w for w in words]
    only_plan, typed = "--plan" in sys.argv, [w for w in words if not w.startswith(OWN)]
    sys.argv[1:] = ["name=ladder", "run_dir=${output_dir}/${name}", *words]
    config.main(lambda cfg: ladder(cfg, typed, only_plan), LadderRun, DEFAULTS, package.__doc__)


def ladder(cfg: DictConfig, typed: list[str], only_plan: bool) -> None:
    """Runs what is missing, and writes what follows.   Raises: ConfigError."""
    from gptrain.ladder import report, runs

    options, folder = cfg.ladder, Path(cfg.run_dir)
    if this_process().is_rank:
        raise ConfigError.of("", None, "starts its runs by itself, and is no rank of a launcher")
    if options.dollars and not options.price:
        wrong = "needs what a device costs for an hour"
        raise ConfigError.of("ladder.dollars", options.dollars, wrong, attempt="ladder.price=2.5")
    if not (script := (home.find_project() or Path.cwd()) / "train.py").is_file():
        raise ConfigError.of(
            "", None, f"{script}: missing, its runs are this script's", code=INPUT_NOT_FOUND
        )
    if not only_plan and find_spec("scipy") is None:
        attempt = "pip install scipy matplotlib"
        raise ConfigError.of("", None, "the law is fitted by scipy: not installed", attempt=attempt)
    target, sizes = find_sizes(cfg, typed)
    counts, seeds = sorted(set(options.tokens_per_parameter)), list(options.seeds or [cfg.seed])
    phases = [find_phases(size, counts) for size in sizes]
    tokens = float(target.cfg.max_tokens or counts[-1] * target.counts["all"])
    warn(sizes, phases[0].total[0], counts[-1])
    place = f"{target.n_devices} x {cfg.hardware.name or 'this machine'}"
    print(report.plan_table(sizes, phases, len(seeds), target, tokens, place), flush=True)
    if only_plan:
        return
    points = [
        point
        for size, parts in zip(sizes, phases, strict=True)
        for seed in seeds
        for point in runs.climb(folder, script, typed, cfg.objective, size, parts, seed, counts)
    ]
    more = ["scheduler=warmup_stable_decay", f"max_tokens={tokens:.0f}", "trainer.max_steps=-1"]
    words = merged(typed, [*target.words, *more, f"law={folder}"])
    facts = report.conclude(options, points, sizes, target, tokens)
    facts["target"] |= {"place": place, "command": shlex.join(["python", "train.py", *words])}
    report.write(folder, facts)


def find_sizes(cfg: DictConfig, typed: list[str]) -> tuple[Size, list[Size]]:
    """The target, and the sizes below it, the smallest first.   Raises: ConfigError."""
    options, width = cfg.ladder, cfg.ladder.lr_width or cfg.model.get("d_model")
    there = {key: plain(cfg, resolve=True)[key] for key in ("hardware", "topology")}
    here = {"hardware": there["hardware"] | {"name": None}, "topology": None}

    def make(words: list[str], place: dict, schema: type[Run]) -> Size:
        its, words = compose_size(typed, words, options, width)
        machine = find_machine(plain(its, resolve=True) | place)[0]
        return make_size(its, words, machine, schema)

    target, sizes = make(options.target.split(), there, Elsewhere), {}
    for one in options.sizes:
        words = one.split() if isinstance(one, str) else scaled(cfg, one)
        size = make(words, here, Run)
        n = size.counts["all"]
        if n in sizes:
            wrong = f"{' '.join(words)} has {n:,} parameters, as another of them"
            raise ConfigError.of("ladder.sizes", OmegaConf.to_container(options.sizes), wrong)
        sizes[n] = size
    return target, [sizes[n] for n in sorted(sizes)]


def warn(sizes: list[Size], fewest_steps: int, most: float) -> None:
    """Prints about which runs the law does not speak."""
    found, passes = [], most * sizes[-1].counts["all"] / sizes[-1].epoch_tokens
    if fewest_steps < FEW_STEPS:
        wrong = f"the smallest net has {fewest_steps} steps: too few for a law"
        attempt = "a smaller data.batch_size, larger nets, or more tokens"
        found.append(Problem("ladder.tokens_per_parameter", None, wrong, "", attempt, DONE))
    if passes > 1:
        wrong = f"the largest net sees it {passes:.1f} times, and the law is about new tokens"
        found.append(Problem("data", None, f"{wrong} (arXiv:2305.16264)", code=DONE))
    for problem in found:
        print(problem.line, file=sys.stderr)

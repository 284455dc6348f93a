"""The loss of a size that was never trained, from smaller ones: outputs/ladder/ladder.json, .png.

    python -m gptrain.ladder experiment=quickstart trainer.max_steps=-1 max_tokens=2e7 \\
        model.n_layers=8 hardware=h100_sxm "ladder.sizes=[0.25,0.375,0.5]"

All that train.py takes describes the target; its length is max_tokens, or the most of
ladder.tokens_per_parameter. What all of it takes is printed first; with --plan that is all. Typed
again, it goes on with the runs that are missing.

    ladder.sizes                 factors of the target's depth and width, or texts of overrides
    ladder.target                overrides of the target alone, as its devices
    ladder.tokens_per_parameter  at which a run of each size is cooled down
    ladder.seeds                 null: seed
    ladder.lr_rule               constant or sqrt_width: how optimizer.lr scales with d_model
    ladder.lr_width              the d_model that optimizer.lr is meant for; null: the target's
    ladder.count                 N: all parameters, matrices (no tables that are looked up), blocks
                                 (no embeddings, no head); auto: what predicts the largest size best
    ladder.budget                FLOPs for which the best size is printed
    hardware                     of the target, as in gptrain.plan
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from gptrain import config
from gptrain.core import locations, shell
from gptrain.core.errors import INPUT_NOT_FOUND, ConfigError
from gptrain.ladder.options import LadderRun
from gptrain.plan.__main__ import DEFAULTS as OF_PLAN
from gptrain.plan.__main__ import spelt_out
from gptrain.runtime.process import this_process

DEFAULTS = OF_PLAN | {
    "ladder": "{sizes:[0.2,0.3,0.4,0.5,0.63],target:'',tokens_per_parameter:[5,10,20],seeds:null,"
    "lr_rule:sqrt_width,lr_width:null,count:auto,budget:null}"
}
OWN = ("ladder.", "hardware", "topology", "run_dir=", "name=")


def main() -> None:
    """The command line, in which hardware=… stands for hardware.name."""
    words = spelt_out(word for word in sys.argv[1:] if word != "--plan")
    only_plan, typed = "--plan" in sys.argv, [w for w in words if not w.startswith(OWN)]
    sys.argv[1:] = ["name=ladder", "run_dir=${output_dir}/${name}", *words]
    config.main(lambda cfg: ladder(cfg, typed, only_plan), LadderRun, DEFAULTS, __doc__)


def ladder(cfg: LadderRun, typed: list[str], only_plan: bool) -> None:
    """Runs what is missing, and writes what follows.   Raises: ConfigError."""
    from gptrain.ladder import report, runs  # here: a wrong command needs no torch
    from gptrain.ladder.sizes import find_phases, find_sizes, merged, warn

    options, folder = cfg.ladder, Path(cfg.run_dir)
    if this_process().is_rank:
        raise ConfigError.of("", None, "starts its runs by itself, and is no rank of a launcher")
    if not (script := (locations.find_project() or Path.cwd()) / "train.py").is_file():
        message = f"{script}: missing, its runs are this script's"
        raise ConfigError.of("", None, message, code=INPUT_NOT_FOUND)
    if not only_plan:
        for package in ("scipy", "matplotlib"):  # of the law and its picture, after hours of runs
            import_module(package)
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
    words = merged(typed, [*target.words, *more])
    facts = report.conclude(options, points, sizes, target, tokens)
    facts["target"] |= {"place": place, "command": shell.train_command(*words)}
    report.write(folder, facts)


if __name__ == "__main__":
    main()

r"""Predict the loss of a large model from a scaling-law sweep over smaller models.

    python -m gptrain.ladder experiment=quickstart trainer.max_steps=-1 max_tokens=2e7 \
        model.n_layers=8 hardware=h100_sxm "ladder.sizes=[0.25,0.375,0.5]"

The overrides of train.py describe the target, which is the large model. Its length is max_tokens,
or the largest of ladder.tokens_per_parameter. The command prints the cost of all runs, trains the
smaller models, fits a scaling law, and writes ladder.json and ladder.png to outputs/ladder. With
--plan it only prints the cost. The same command, typed again, continues with the missing runs.

    ladder.sizes                 factors for the target's depth and width, or strings of overrides
    ladder.target                overrides for the target only, such as its devices
    ladder.tokens_per_parameter  lengths of the runs of each size; the learning rate decays at the
                                 end of each run
    ladder.seeds                 seeds of the runs; null: the key seed
    ladder.lr_rule               how optimizer.lr changes with d_model: constant or sqrt_width
    ladder.lr_width              the d_model for which optimizer.lr was chosen; null: the target's
    ladder.count                 which parameters the law counts as N: all, matrices (no embedding
                                 tables), blocks (no embeddings, no head), or auto: the choice that
                                 predicts the largest size best
    ladder.budget                FLOPs for which the best model size is printed
    hardware                     hardware of the target, as in gptrain.plan
"""

import sys
from importlib import import_module
from pathlib import Path

from gptrain import config
from gptrain.core import locations, shell
from gptrain.core.errors import INPUT_NOT_FOUND, ConfigError
from gptrain.ladder.options import LadderRun
from gptrain.plan.options import DEFAULTS as OF_PLAN
from gptrain.plan.options import expand_hardware
from gptrain.runtime.process import this_process

DEFAULTS = OF_PLAN | {
    "ladder": "{sizes:[0.2,0.3,0.4,0.5,0.63],target:'',tokens_per_parameter:[5,10,20],seeds:null,"
    "lr_rule:sqrt_width,lr_width:null,count:auto,budget:null}"
}
# Words of the command line that train.py does not get.
OWN = ("ladder.", "hardware", "topology", "run_dir=", "name=")


def main() -> None:
    """Run `python -m gptrain.ladder` with the words in `sys.argv`, and exit the process.

    The command trains small models, fits a scaling law to their losses and predicts the loss of the
    target (see the docstring of this file). With the flag `--plan` it prints the cost only. The
    word `hardware=…` stands for `hardware.name=…`. The exit codes are those of train.py.
    """
    only_plan = "--plan" in sys.argv
    words = expand_hardware(word for word in sys.argv[1:] if word != "--plan")
    typed = [word for word in words if not word.startswith(OWN)]
    sys.argv[1:] = ["name=ladder", "run_dir=${output_dir}/${name}", *words]
    config.main(lambda cfg: ladder(cfg, typed, only_plan), LadderRun, DEFAULTS, __doc__)


def ladder(cfg: LadderRun, typed: list[str], only_plan: bool) -> None:
    """Print the cost of the sweep, train the missing runs, and write the report.

    The runs, ladder.json and ladder.png are written below `cfg.run_dir`.

    Args:
        cfg: Configuration of the target and of the sweep.
        typed: Overrides for train.py that the user typed, without the words of this command, such
            as `ladder.sizes`.
        only_plan: True to print the cost and stop.

    Raises:
        ConfigError: If a value does not fit, if the command runs as a rank of a launcher, or if
            there is no train.py.
        HydraException: If an override in `ladder.sizes` or `ladder.target` is not valid.
        ModuleNotFoundError: If scipy or matplotlib is missing, before the first run.
        SystemExit: If a run fails, with the exit code of this run.
    """
    # Imported late: a wrong command line is reported without the import of torch.
    from gptrain.ladder import report, runs
    from gptrain.ladder.sizes import find_phases, find_sizes, replace_overrides, warn

    options = cfg.ladder
    folder = Path(cfg.run_dir)
    if this_process().is_rank:
        message = "the command starts its runs itself"
        hint = "the same command without torchrun, srun or mpirun"
        raise ConfigError.of("", None, message, hint=hint)
    script = (locations.find_project() or Path.cwd()) / "train.py"
    if not script.is_file():
        message = f"{script}: missing; the runs of the sweep are runs of this script"
        raise ConfigError.of("", None, message, code=INPUT_NOT_FOUND)
    if not only_plan:
        # Fail before the runs if a package is missing that the report needs after them.
        for package in ("scipy", "matplotlib"):
            import_module(package)
    target, sizes = find_sizes(cfg, typed)
    counts = sorted(set(options.tokens_per_parameter))
    seeds = list(options.seeds or [cfg.seed])
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
        for point in runs.train_size(
            folder, script, typed, cfg.objective, size, parts, seed, counts
        )
    ]
    schedule = ["scheduler=warmup_stable_decay", f"max_tokens={tokens:.0f}", "trainer.max_steps=-1"]
    words = replace_overrides(replace_overrides(typed, target.words), schedule)
    facts = report.conclude(options, points, sizes, target, tokens)
    facts["target"] |= {"place": place, "command": shell.train_command(*words)}
    report.write(folder, facts)


if __name__ == "__main__":
    main()

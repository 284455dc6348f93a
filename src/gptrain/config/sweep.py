"""A sweep as a person sees it: a line where a job begins, and a table of all at the end.

All that a job says is in its train.log; warnings and errors are shown in full.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gptrain.checkpoints import fileops
from gptrain.config.compose import line_of, parse
from gptrain.config.from_run import is_left_out, typed_again
from gptrain.core import labels
from gptrain.core.shell import override, train_command
from gptrain.runs.folder import MALFORMED_FILE_ERRORS, OVERRIDES, RunRecord, read_run, read_runs
from gptrain.runs.table import is_same_value, rank_runs, table, text_table

LENGTHS = ("trainer.max_steps", "trainer.max_epochs", "max_tokens")
LEVELS = ("hydra.job_logging.handlers.console.level", "hydra.hydra_logging.root.level")


def job_options(typed: Sequence[Override], first: DictConfig) -> list[str]:
    """Overrides by which jobs are named by what varies alone, and say no more than warnings.

    Args:
        first: the config of the first job.
    """
    same = [one.key_or_group for one in typed if not one.is_sweep_override()]
    quiet = [f"{key}=WARNING" for key in LEVELS if OmegaConf.select(first, key)]
    return [f"hydra.job.config.override_dirname.exclude_keys={same}", *quiet]


def keep_typed(node: DictConfig) -> Path:
    """Make the folder of a job that trains nothing, keep its overrides in it, and return it."""
    folder = Path(node.runtime.output_dir)
    (folder / OVERRIDES).parent.mkdir(parents=True)
    fileops.replace(folder / OVERRIDES, OmegaConf.to_yaml(node.overrides.task).encode())
    return folder


def find_finished(node: DictConfig) -> RunRecord | None:
    """Return the run in a job's own folder, if it is done and reached what this job asks for.

    A sweep that is typed again in its folder asks for jobs that have run. One that was continued
    since is longer than it is asked to be, and done. One that is to be longer is not done.
    """
    try:
        run = read_run(Path(node.runtime.output_dir))
    except MALFORMED_FILE_ERRORS:
        # There is no run, or its files cannot be read: the checks of the job report that.
        return None
    then, now = _identity(run.overrides), _identity(node.overrides.task)
    is_same = all(
        is_same_value(then.get(key), now.get(key))
        or (key in LENGTHS and _reaches(then[key], now[key]))
        for key in then.keys() | now.keys()
    )
    return run if run.is_done and is_same else None


def _identity(words: Sequence[str]) -> dict[str, str]:
    """Key -> value of the overrides that say which run it is: not where it lies or starts from."""
    pairs = (line_of(one).partition("=") for one in parse(list(words))[0] if not is_left_out(one))
    return {key.lstrip("+"): value for key, _, value in pairs}


def _reaches(then: str | None, now: str | None) -> bool:
    """Whether a run of one length is at least as long as another, both as typed."""
    try:
        return float(then or "") >= float(now or "") > 0
    except ValueError:
        return False


def report_finished(run: RunRecord, objective: str) -> float | None:
    """Print that a job of this sweep was finished before, and return its objective."""
    text = f"{run.path.name}: finished before, its result is read"
    print(labels.line("done", text), flush=True)
    return run.metrics.get(objective)


def report_sweep(folder: Path, searched: Sequence[str] = ()) -> None:
    """Print the table of all jobs, the best first, and write results.csv.

    Args:
        searched: Overrides that name where choices are looked up; `next` has to repeat them.

    Raises:
        OSError: If results.csv cannot be written.
    """
    if runs := read_runs([folder]):
        metric, runs = rank_runs(runs)
        print(f"\n{text_table(runs, metric)}")
        every = sorted({name for run in runs for name in run.metrics})
        with open(folder / "results.csv", "w", newline="") as file:
            csv.writer(file).writerows(table(runs, every))
        print(labels.line("results", folder / "results.csv"), flush=True)
        if metric in runs[0].metrics:
            best = runs[0]
            words = [override(key, best.path) for key in ("from_run", "run_dir")]
            words += ["ckpt_path=last", twice_as_long(best)]
            words += typed_again([*searched, *best.overrides], best.path)
            text = f"the best goes on: {train_command(*words)}"
            print(labels.line("next", text), flush=True)


def twice_as_long(run: RunRecord) -> str:
    """Return the override that doubles a run's length, by the limit that ended the run."""
    limit = re.fullmatch(r"(trainer\.max_steps|trainer\.max_epochs|max_tokens)=(.+)", run.detail)
    if run.ended.endswith(" done") and limit:
        return f"{limit[1]}={2 * float(limit[2]):.15g}"
    return f"trainer.max_steps={2 * int(run.steps or 1)}"

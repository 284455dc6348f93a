"""A sweep as a person sees it: a line where a job begins, and a table of all at the end.

All that a job says is in its train.log; warnings and errors are shown in full.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gptrain.problems import DONE
from gptrain.resilience import fileops
from gptrain.resilience.status import RESULT_NAME, to_json, write_status
from gptrain.runs.folder import OVERRIDES, RunRecord, read_runs
from gptrain.runs.table import ranked, table, text_table
from gptrain.small_files import read_json

LEVELS = ("hydra.job_logging.handlers.console.level", "hydra.hydra_logging.root.level")


def job_options(typed: Sequence[Override], first: DictConfig) -> list[str]:
    """Overrides by which jobs are named by what varies alone, and say no more than warnings.

    Args:
        first: the config of the first job.
    """
    same = [one.key_or_group for one in typed if not one.is_sweep_override()]
    quiet = [f"{key}=WARNING" for key in LEVELS if OmegaConf.select(first, key)]
    return [f"hydra.job.config.override_dirname.exclude_keys={same}", *quiet]


def find_repeated(sweep: Path, node: DictConfig) -> RunRecord | None:
    """The run of this sweep that is done and was typed as this job is."""
    typed = sorted(node.overrides.task)
    return next((r for r in read_runs([sweep]) if r.is_done and sorted(r.overrides) == typed), None)


def repeat(run: RunRecord, node: DictConfig, objective: str) -> float | None:
    """Takes that run's result for the job's, which trains nothing. Raises: OSError, ValueError."""
    folder, ended = keep_typed(node), {"reason": "repeats", "detail": run.path.name}
    result = read_json(run.path / RESULT_NAME) | {"ended": ended}
    fileops.replace(folder / RESULT_NAME, to_json(result))
    write_status(folder, cause="done", exit_code=DONE, message=f"repeats {run.path.name}")
    print(f"{'repeats':9} {run.path.name}: its result is read", flush=True)
    return run.metrics.get(objective)


def keep_typed(node: DictConfig) -> Path:
    """The folder of a job that trains nothing, with what was typed for it."""
    folder = Path(node.runtime.output_dir)
    (folder / OVERRIDES).parent.mkdir(parents=True)
    fileops.replace(folder / OVERRIDES, OmegaConf.to_yaml(node.overrides.task).encode())
    return folder


def report_sweep(folder: Path) -> None:
    """Prints the table of all jobs, the best first, and writes results.csv. Raises: OSError."""
    if runs := read_runs([folder]):
        metric, runs = ranked(runs)
        print(f"\n{text_table(runs, metric)}")
        every = sorted({name for run in runs for name in run.metrics})
        with open(folder / "results.csv", "w", newline="") as file:
            csv.writer(file).writerows(table(runs, every))
        print(f"{'results':9} {folder / 'results.csv'}", flush=True)
        if metric in runs[0].metrics:
            best = shlex.quote(str(runs[0].path))
            more = f"python train.py from_run={best} run_dir={best} ckpt_path=last"
            print(f"{'next':9} the best goes on: {more} trainer.max_steps=<more>", flush=True)

"""A sweep as a person sees it: a line where a job begins, and a table of all at the end.

All that a job says is in its train.log; warnings and errors are shown in full.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gptrain.resilience import fileops
from gptrain.resilience.status import write_status
from gptrain.runs.folder import OVERRIDES, read_runs
from gptrain.runs.table import ranked, table, text_table

LEVELS = ("hydra.job_logging.handlers.console.level", "hydra.hydra_logging.root.level")


def job_options(typed: Sequence[Override], first: DictConfig) -> list[str]:
    """Overrides by which jobs are named by what varies alone, and say no more than warnings.

    Args:
        first: the config of the first job.
    """
    same = [one.key_or_group for one in typed if not one.is_sweep_override()]
    quiet = [f"{key}=WARNING" for key in LEVELS if OmegaConf.select(first, key)]
    return [f"hydra.job.config.override_dirname.exclude_keys={same}", *quiet]


def begin_job(node: DictConfig) -> None:
    """Says which job it is, by what varies."""
    print(f"{f'job {node.job.num}':9} {node.job.override_dirname}", flush=True)


def note_refusal(node: DictConfig, code: int, said: str) -> None:
    """Keeps the record of a job that did not start, in the empty folder that it had."""
    folder, typed = Path(node.runtime.output_dir), node.overrides.task
    (folder / OVERRIDES).parent.mkdir(parents=True)
    fileops.replace(folder / OVERRIDES, OmegaConf.to_yaml(typed).encode())
    write_status(folder, cause="refused", exit_code=code, message=said)


def report_sweep(folder: Path) -> None:
    """Prints the table of all jobs, the best first, and writes results.csv. Raises: OSError."""
    if runs := read_runs([folder]):
        metric, runs = ranked(runs)
        print(f"\n{text_table(runs, metric)}")
        every = sorted({name for run in runs for name in run.metrics})
        with open(folder / "results.csv", "w", newline="") as file:
            csv.writer(file).writerows(table(runs, every))
        print(f"{'results':9} {folder / 'results.csv'}", flush=True)

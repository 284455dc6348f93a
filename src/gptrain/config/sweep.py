"""Jobs of a sweep: finished jobs are skipped, and a table of all jobs is printed at the end."""

import csv
from collections.abc import Sequence
from pathlib import Path

import yaml

from gptrain.checkpoints.status import write_status
from gptrain.config.from_run import is_left_out
from gptrain.core import labels
from gptrain.core.shell import override, train_command
from gptrain.runs import table as runs


def find_finished(folder: Path, words: Sequence[str]) -> runs.RunRecord | None:
    """Return and announce the finished run in the folder of a job, or None if the job has to run.

    The overrides of the run are `words`, the job's, except those that `from_run` leaves out.
    """
    try:
        run = runs.read_run(folder)
    except runs.MALFORMED_FILE_ERRORS:
        return None  # no run, or damaged files, which the job reports
    before, now = ({w for w in each if not is_left_out(w)} for each in (run.overrides, words))
    if not run.is_done or before != now:
        return None
    print(labels.line("done", f"{folder.name}: finished earlier, its result is reused"), flush=True)
    return run


def record_refusal(folder: Path, words: Sequence[str], code: int, message: str) -> None:
    """Record a job whose config was refused, and its overrides `words`, for the sweep's table."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([*words]))
    write_status(folder, cause="refused", exit_code=code, message=message)


def report_sweep(folder: Path) -> None:
    """Print the table of all jobs, if there are any, and write it to results.csv."""
    if records := runs.read_runs([folder]):
        metric, records = runs.rank_runs(records)
        print(f"\n{runs.text_table(records, metric)}")
        names = sorted({name for record in records for name in record.metrics})
        with open(folder / "results.csv", "w", newline="") as file:
            csv.writer(file).writerows(runs.table(records, names))
        print(labels.line("results", folder / "results.csv"), flush=True)
        best = train_command(override("from_run", records[0].path), "task=test")
        print(labels.line("next", f"test the best job: {best}"), flush=True)

"""Output of a sweep: one line per job, and a table of all jobs at the end.

The terminal shows warnings and errors of a job. The complete output of a job is in its train.log.
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from gptrain.checkpoints import fileops
from gptrain.config.from_run import is_left_out, words_to_repeat
from gptrain.config.overrides import line_of, parse
from gptrain.core import labels
from gptrain.core.shell import by_key, override, train_command
from gptrain.runs.folder import MALFORMED_FILE_ERRORS, OVERRIDES, RunRecord, read_run, read_runs
from gptrain.runs.table import rank_runs, table, text_table

LENGTHS = ("trainer.max_steps", "trainer.max_epochs", "max_tokens")
LOG_LEVELS = ("hydra.job_logging.handlers.console.level", "hydra.hydra_logging.root.level")


def job_options(overrides: Sequence[Override], log_levels: Sequence[str]) -> list[str]:
    """Return overrides of Hydra that name the jobs of a sweep and make their log quiet.

    The name of a job shows only the keys that the sweep varies, because the other keys are in
    Hydra's list of excluded keys.

    Args:
        overrides: All overrides of the sweep.
        log_levels: Keys of Hydra's log levels, which are set to WARNING.
    """
    constant = [override.key_or_group for override in overrides if not override.is_sweep_override()]
    quiet = [f"{key}=WARNING" for key in log_levels]
    return [f"hydra.job.config.override_dirname.exclude_keys={constant}", *quiet]


def save_overrides(folder: Path, words: list[str]) -> None:
    """Create the folder of a job that was refused, and write its overrides as Hydra would.

    The table at the end of the sweep finds the job by this file, .hydra/overrides.yaml.

    Args:
        folder: Folder of the job, which must not contain .hydra.
        words: Overrides of the job.

    Raises:
        OSError: If .hydra exists or the folder cannot be written.
    """
    (folder / OVERRIDES).parent.mkdir(parents=True)
    fileops.replace(folder / OVERRIDES, OmegaConf.to_yaml(words).encode())


def find_finished(folder: Path, words: Sequence[str]) -> RunRecord | None:
    """Return the finished run in the folder of a job, or None if the job has to run.

    The run counts as finished if it is done, has the same overrides as the job, and is at least as
    long as the job. Overrides that `from_run` would leave out, such as the run folder, are not
    compared. So a sweep that is started again in its folder skips its finished jobs. The result is
    also None if the folder has no run, or damaged files.

    Args:
        folder: Folder of the job, which may be empty.
        words: Overrides of the job.
    """
    try:
        run = read_run(folder)
    except MALFORMED_FILE_ERRORS:
        return None  # no run, or damaged files, which the checks of the job report
    before, now = _identity(run.overrides), _identity(words)
    is_same = all(
        before.get(key) == now.get(key)
        or (key in LENGTHS and _reaches(before.get(key), now.get(key)))
        for key in before.keys() | now.keys()
    )
    return run if run.is_done and is_same else None


def _identity(words: Sequence[str]) -> dict[str, str]:
    """Return key and value of each override that decides what a job computes.

    Overrides that only set where files are, and the others that `is_left_out` names, are missing.

    Args:
        words: Overrides of the job.
    """
    parsed, _ = parse(list(words))
    return by_key(line_of(override) for override in parsed if not is_left_out(override))


def _reaches(length: str | None, needed: str | None) -> bool:
    """Return whether the length of a finished run is at least the length that a job asks for.

    False if one of the two is missing or not a positive number.

    Args:
        length: Value of a key in LENGTHS in the finished run, or None.
        needed: Value of the same key in the job, or None.
    """
    try:
        return float(length or "") >= float(needed or "") > 0
    except ValueError:
        return False


def report_finished(run: RunRecord, objective: str) -> float | None:
    """Print that a job is skipped, and return the metric that the sweep optimizes.

    Args:
        run: Finished run in the folder of the job.
        objective: Name of the metric. None is returned if the run has no such metric.
    """
    text = f"{run.path.name}: finished earlier, its result is reused"
    print(labels.line("done", text), flush=True)
    return run.metrics.get(objective)


def report_sweep(folder: Path, search_path: Sequence[str] = ()) -> None:
    """Print the table of all jobs, the best first, and write it to results.csv.

    If the best job has measured the objective, the last line is a command that trains this job for
    twice as long. Does nothing if the folder has no runs. A run that cannot be read is left out,
    with a warning.

    Args:
        folder: Folder of the sweep.
        search_path: Overrides of `hydra.searchpath`, which that command has to repeat.

    Raises:
        OSError: If results.csv cannot be written.
    """
    if runs := read_runs([folder]):
        metric, runs = rank_runs(runs)
        print(f"\n{text_table(runs, metric)}")
        names = sorted({name for run in runs for name in run.metrics})
        with open(folder / "results.csv", "w", newline="") as file:
            csv.writer(file).writerows(table(runs, names))
        print(labels.line("results", folder / "results.csv"), flush=True)
        if metric in runs[0].metrics:
            best = runs[0]
            words = [override(key, best.path) for key in ("from_run", "run_dir")]
            words += ["ckpt_path=last", twice_as_long(best)]
            words += words_to_repeat([*search_path, *best.overrides], best.path)
            text = f"resume the best job: {train_command(*words)}"
            print(labels.line("next", text), flush=True)


def twice_as_long(run: RunRecord) -> str:
    """Return the override that doubles the length of a run.

    The key is the limit that ended the run, or `trainer.max_steps` if the run ended otherwise.

    Args:
        run: Record of the run.
    """
    limit = re.fullmatch(r"(trainer\.max_steps|trainer\.max_epochs|max_tokens)=(.+)", run.detail)
    if run.ended.endswith(" done") and limit:
        return f"{limit[1]}={2 * float(limit[2]):.15g}"
    return f"trainer.max_steps={2 * int(run.steps or 1)}"

"""A sweep as a person sees it: a line where a job begins, and a table of all at the end.

All that a job says is in its train.log; warnings and errors are shown in full.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gptrain.resilience import fileops
from gptrain.resilience.status import write_status
from gptrain.runs.folder import OVERRIDES, read_runs
from gptrain.runs.table import ranked, table, text_table

LEVELS = ("hydra.job_logging.handlers.console.level", "hydra.hydra_logging.root.level")


@dataclass(frozen=True)
class Sweep:
    """The jobs of one command.

    Attributes:
        fixed: keys that all jobs have alike.
        quiet: overrides that keep the words of jobs off the terminal.
    """

    folder: Path
    fixed: frozenset[str]
    quiet: list[str]

    @classmethod
    def of(cls, overrides: Sequence[Override], first: DictConfig) -> Sweep:
        """The sweep that was typed; `first` is the config of its first job."""
        fixed = frozenset(o.key_or_group for o in overrides if not o.is_sweep_override())
        quiet = [f"{key}=WARNING" for key in LEVELS if OmegaConf.select(first, key)]
        return cls(Path(first.hydra.sweep.dir), fixed, quiet)

    def begin(self, node: DictConfig) -> None:
        """Says which job it is, by what varies."""
        words = (word.lstrip("+") for word in node.overrides.task)
        own = (word for word in words if word.partition("=")[0] not in self.fixed)
        print(f"{f'job {node.job.num}':9} {' '.join(own)}", flush=True)

    def note_refusal(self, node: DictConfig, code: int, said: str) -> None:
        """Keeps the record of a job that did not start, in the empty folder that it had."""
        folder, typed = Path(node.runtime.output_dir), node.overrides.task
        (folder / OVERRIDES).parent.mkdir(parents=True)
        fileops.replace(folder / OVERRIDES, OmegaConf.to_yaml(typed).encode())
        write_status(folder, cause="refused", exit_code=code, message=said)

    def report(self) -> None:
        """Prints the table of all jobs, the best first, and writes results.csv. Raises: OSError."""
        if runs := read_runs([self.folder]):
            metric, runs = ranked(runs)
            print(f"\n{text_table(runs, metric)}")
            every = sorted({name for run in runs for name in run.metrics})
            with open(self.folder / "results.csv", "w", newline="") as file:
                csv.writer(file).writerows(table(runs, every))
            print(f"{'results':9} {self.folder / 'results.csv'}")
            folder = shlex.quote(str(self.folder))
            print(f"{'next':9} python -m gptrain.runs {folder} --html runs.html", flush=True)

"""A sweep as a person sees it: a line where a job begins, one where it ends, a table at the end.

All that a job says is in its train.log; warnings and errors are shown in full.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gptrain.resilience import fileops
from gptrain.resilience.status import write_status
from gptrain.runs.folder import OVERRIDES, find_runs, read_run
from gptrain.runs.table import csv_table, ranked, summary, text_table
from gptrain.small_files import UnreadableFile

LEVELS = ("hydra.job_logging.handlers.console.level", "hydra.hydra_logging.root.level")


@dataclass(frozen=True)
class Sweep:
    """The jobs of one command.

    Attributes:
        fixed: overrides that all jobs have.   quiet: overrides that keep their words off the
            terminal.   mode: which value of the objective is the best.
    """

    folder: Path
    fixed: frozenset[str]
    quiet: tuple[str, ...]
    objective: str
    mode: str

    @classmethod
    def of(cls, overrides: Sequence[Override], first: DictConfig) -> Sweep:
        """The sweep that was typed; `first` is the config of its first job."""
        fixed = frozenset(_key(o.input_line) for o in overrides if not o.is_sweep_override())
        quiet = (f"{key}=WARNING" for key in LEVELS if OmegaConf.select(first, key))
        folder = Path(first.hydra.sweep.dir)
        return cls(folder, fixed, tuple(quiet), first.objective, first.checkpoint.mode)

    def begin(self, node: DictConfig) -> None:
        """Says which job it is, by what varies."""
        own = (word for word in node.overrides.task if _key(word) not in self.fixed)
        print(f"{f'job {node.job.num}':9} {' '.join(own)}", flush=True)

    def end(self, node: DictConfig) -> None:
        """Says what became of a job that is done."""
        with suppress(UnreadableFile, OSError):  # of a command that keeps no record
            line = summary(read_run(Path(node.runtime.output_dir)), self.objective)
            print(f"{'ended':9} {line}", flush=True)

    def note_refusal(self, node: DictConfig, code: int, said: str) -> None:
        """Keeps the record of a job that did not start, in the empty folder that it had."""
        folder, typed = Path(node.runtime.output_dir), node.overrides.task
        (folder / OVERRIDES).parent.mkdir(parents=True)
        fileops.replace(folder / OVERRIDES, OmegaConf.to_yaml(typed).encode())
        write_status(folder, cause="refused", exit_code=code, message=said)

    def report(self) -> None:
        """Prints the table of all jobs, the best first, and writes results.csv."""
        runs = []
        for path in find_runs(self.folder):
            with suppress(UnreadableFile, OSError):
                runs.append(read_run(path))
        if not runs:
            return
        runs = ranked(runs, self.objective, self.mode)
        print(f"\n{text_table(runs, self.objective)}")
        try:
            fileops.replace(self.folder / "results.csv", csv_table(runs).encode())
            print(f"{'results':9} {self.folder / 'results.csv'}")
        except OSError as error:
            print(f"warning: no results.csv: {error}", file=sys.stderr)
        folder = shlex.quote(str(self.folder))
        print(f"{'next':9} python -m gptrain.runs {folder} --html runs.html", flush=True)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")

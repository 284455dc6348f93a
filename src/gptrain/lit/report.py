"""What a run tells a person: five lines at the start, a few at the end; and result.json."""

import glob
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import OmegaConf

from gptrain.checkpoints import fileops
from gptrain.checkpoints.status import RESULT_NAME, to_json, write_result
from gptrain.core import labels, shell
from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.monitor import STEP, TrainingMonitor
from gptrain.lit.callbacks.vote import gather
from gptrain.lit.lightning import connected, data_of, strategy_of
from gptrain.lit.perf import Speed, peak_memory_bytes, reset_peak_memory

log = logging.getLogger(__name__)
LONGEST_WAIT = 0.1  # of the time of training, for data: above it is named as the cause of slowness


@dataclass
class Report:
    """The lines of one run, from rank 0 alone.

    Attributes:
        lines: label -> what the start says of it, in the order of printing.
        hyper_parameters: the whole config, for the loggers, and `typed`: option -> value, of those
            that were typed and tell this run from another.
        facts: what else result.json keeps, of what the run was made by.
        planned: the planner's estimates, for plan.json.
        outside: overrides that name files which are read only where they are typed again.
    """

    lines: dict[str, str]
    hyper_parameters: dict[str, Any]
    facts: dict[str, Any]
    planned: dict[str, Any] | None
    outside: Sequence[str]
    start_s: float = 0.0
    start_time_s: float = 0.0

    @property
    def run_dir(self) -> Path:
        return Path(self.hyper_parameters["run_dir"])

    def start(self, trainer: pl.Trainer) -> None:
        """Prints what will run, with what, on how much, and where to; tells it to the loggers."""
        self.start_s = time.perf_counter()
        self.start_time_s = time.time()
        reset_peak_memory(strategy_of(trainer).root_device)
        if trainer.is_global_zero:
            if self.hyper_parameters["print_config"]:
                config = {k: v for k, v in self.hyper_parameters.items() if k != "typed"}
                log.info(OmegaConf.to_yaml(config))
            for label, line in self.lines.items():
                log.info(labels.line(label, line))
            if self.planned is not None:
                fileops.replace(self.run_dir / "plan.json", to_json(self.planned))
        for logger in trainer.loggers:
            logger.log_hyperparams(self.hyper_parameters)

    def end(self, trainer: pl.Trainer) -> dict[str, float]:
        """Prints the result and what to type next, and writes result.json; returns the metrics."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics.pop(STEP, None)
        peak_bytes = max(gather(peak_memory_bytes(strategy_of(trainer).root_device)))
        if not trainer.is_global_zero:
            return metrics
        seconds = time.perf_counter() - self.start_s
        steps = find_callback(trainer, TrainingMonitor)
        checkpoints = find_callback(trainer, Checkpoints)
        best = checkpoints and [*checkpoints.ranking(), checkpoints.store.newest()][0]
        path = self.run_dir / RESULT_NAME
        ended = steps.ended or {
            "reason": f"{cast(TrainerFn, trainer.state.fn).value} done",
            "detail": f"of {trainer.ckpt_path or 'the weights that it began with'}",
        }
        first = steps.first_step
        is_new = first is not None or trainer.state.fn != "fit"
        n_missing = steps.missing_targets.n_steps
        missing = {"steps_without_target": n_missing} if n_missing else {}
        if not connected(trainer).fast_dev_run and (is_new or not path.exists()):
            write_result(
                path,
                metrics,
                steps=trainer.global_step,
                tokens=data_of(trainer).tokens,
                seconds=seconds,
                checkpoint=best,
                ended=ended,
                peak_memory_bytes=peak_bytes,
                **missing,
                **self.facts,
            )
        parts = []
        if first is not None:
            n_done = trainer.global_step - first
            parts.append(f"{n_done} step{'' if n_done == 1 else 's'} in {seconds:.0f} s")
            if first:
                parts[0] += f", from step {first} to {trainer.global_step}"
        shown = (name for name in metrics if name.startswith(("train/loss", "val/", "test/")))
        parts += [f"{name} {metrics[name]:.4f}" for name in shown]
        if "perf/tokens_per_s" in metrics:
            parts.append(f"{metrics['perf/tokens_per_s']:,.0f} {steps.lengths.unit}/s")
        if "perf/mfu" in metrics:
            parts.append(f"mfu {metrics['perf/mfu']:.2f} of {steps.speed.peak}")
        if first is not None and (slow := waiting_line(trainer, steps.speed)):
            parts.append(slow)
        each = " a rank" if trainer.world_size > 1 else ""
        parts.append(f"peak memory {peak_bytes / 2**30:.2f} GiB{each}")
        if files := profile_files(trainer, self.start_time_s):
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            parts.append(f"profile {files[0]}{more}")
        if n_missing:
            parts.append(f"{n_missing} step{'' if n_missing == 1 else 's'} without a target")
        parts.append(", ".join(ended.values()))
        log.info(labels.line("result", " · ".join(parts)))
        log.info(labels.line("next", self._next(trainer, best)))
        return metrics

    def _next(self, trainer: pl.Trainer, best: Path | None) -> str:
        if connected(trainer).fast_dev_run:
            return "every part works; run it without trainer.fast_dev_run"
        words = [shell.override("from_run", self.run_dir), "task=test", *self.outside]
        shown = shell.command("tensorboard", "--logdir", shell.folder_argument(self.run_dir))
        return f"{shell.train_command(*words)} · {shown}" if best else shown


def waiting_line(trainer: pl.Trainer, speed: Speed) -> str:
    """Return what to try where training waited for data too long, else an empty text."""
    waited = speed.waited_s / speed.trained_s if speed.trained_s else 0.0
    if waited <= LONGEST_WAIT:
        return ""
    n_workers, n_cpus = connected(trainer).train_dataloader.num_workers, os.cpu_count() or 1
    line = f"{100 * waited:.0f} % of the time waited for data"
    if n_workers >= n_cpus:
        return f"{line} of data.num_workers={n_workers}, on {n_cpus} CPUs"
    return f"{line}; try data.num_workers={2 * n_workers or 2}"


def profile_files(trainer: pl.Trainer, since_s: float) -> list[Path]:
    """Return the files that the run's profiler has written, its report before its traces.

    Args:
        since_s: Time at which the run started: older files are of another run.
    """
    profiler = connected(trainer).profiler
    folder, name = getattr(profiler, "dirpath", None), getattr(profiler, "filename", None)
    if not folder or not name:
        return []
    found = Path(folder).glob(f"*{glob.escape(name)}*")
    new = [path for path in found if path.stat().st_mtime >= since_s]
    return sorted(new, key=lambda path: (path.suffix != ".txt", path.name))


def find_callback(trainer: pl.Trainer, kind: type[pl.Callback]) -> Any:
    """The run's callback of that class, None where it has none."""
    return next((part for part in connected(trainer).callbacks if isinstance(part, kind)), None)

"""The lines that a run prints at its start and at its end, and result.json."""

import glob
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import OmegaConf

from gptrain.checkpoints import timeline
from gptrain.checkpoints.status import RESULT_NAME, write_result
from gptrain.core import labels, shell
from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.monitor import TrainingMonitor
from gptrain.lit.lightning import (
    callbacks_of,
    data_of,
    is_fast_dev_run,
    profiler_of,
    strategy_of,
    train_loader_of,
)
from gptrain.lit.loggers.notes import STEP
from gptrain.lit.perf import Speed, peak_memory_bytes, reset_peak_memory
from gptrain.lit.user_data import has_loader
from gptrain.parallel.mesh import gather

log = logging.getLogger(__name__)
# Fraction of the training time that may be spent waiting for data before the result line names it.
MAX_WAIT_FRACTION = 0.1
MAX_ELEMENTS = 4  # largest number of elements of a metric that the result line shows

CallbackT = TypeVar("CallbackT", bound=pl.Callback)


@dataclass
class Report:
    """Describes one run to the user and to the loggers. All ranks have one; rank 0 prints.

    Attributes:
        lines: Label -> text of the lines that are printed at the start, in this order.
        hyper_parameters: The config as plain values, for the loggers. The additional key `typed`
            holds the overrides, key -> value, that distinguish this run from other runs.
        facts: Further entries of result.json: versions, hardware and the overrides of the run.
        repeated_overrides: Overrides that a command with `from_run=<this run>` has to repeat,
            because such a command does not take them from the run.
        start_s: Value of `time.perf_counter()` when the run started.
        start_time_s: Value of `time.time()` when the run started.
    """

    lines: dict[str, str]
    hyper_parameters: dict[str, Any]
    facts: dict[str, Any]
    repeated_overrides: Sequence[str]
    start_s: float = 0.0
    start_time_s: float = 0.0

    @property
    def run_dir(self) -> Path:
        """Output folder of the run."""
        return Path(self.hyper_parameters["run_dir"])

    def start(self, trainer: pl.Trainer) -> None:
        """Start the clock, print `lines` and log the hyperparameters.

        With print_config=true the whole config is printed first. The measurement of the peak memory
        begins again. All ranks must call this method before the Trainer runs; only rank 0 prints.

        Args:
            trainer: Trainer of the run.
        """
        self.start_s = time.perf_counter()
        self.start_time_s = time.time()
        reset_peak_memory(strategy_of(trainer).root_device)
        if trainer.is_global_zero:
            if self.hyper_parameters["print_config"]:
                config = {k: v for k, v in self.hyper_parameters.items() if k != "typed"}
                log.info(OmegaConf.to_yaml(config))
            for label, text in self.lines.items():
                log.info(labels.line(label, text))
        for logger in trainer.loggers:
            logger.log_hyperparams(self.hyper_parameters)

    def end(self, trainer: pl.Trainer) -> dict[str, float]:
        """Print the result and the next command, write result.json and return the metrics.

        result.json is not written under fast_dev_run, and a fit in which no step was left does not
        overwrite one that exists. On rank 0 the timeline of the run is closed. All ranks must call
        this method after the Trainer has run; only rank 0 prints and writes.

        Args:
            trainer: Trainer of the run, after a fit, a validation or a test without an error.

        Returns:
            Final value of each logged metric by its logged name. `step` is left out.

        Raises:
            OSError: On rank 0, if result.json cannot be written, or the checkpoints cannot be read.
        """
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics.pop(STEP, None)  # the x axis of the loggers
        peak_bytes = max(gather(peak_memory_bytes(strategy_of(trainer).root_device)))
        if not trainer.is_global_zero:
            return metrics
        seconds = time.perf_counter() - self.start_s
        monitor = find_callback(trainer, TrainingMonitor)
        assert monitor is not None, "build_trainer adds a TrainingMonitor to every run"
        ended = monitor.ended or {
            "reason": f"{cast(TrainerFn, trainer.state.fn).value} done",
            "detail": f"of {trainer.ckpt_path or 'the initial weights'}",
        }
        best = best_checkpoint(trainer)
        path = self.run_dir / RESULT_NAME
        has_worked = monitor.first_step is not None or trainer.state.fn != "fit"
        goodput = monitor.timeline.end(trainer.global_step)
        if not is_fast_dev_run(trainer) and (has_worked or not path.exists()):
            n_missing = monitor.missing_targets.n_steps
            missing = {"steps_without_target": n_missing} if n_missing else {}
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
                **goodput,
                **self.facts,
            )
        parts = self._result_parts(trainer, monitor, metrics, seconds, peak_bytes)
        if goodput:
            parts.append(timeline.describe(goodput))
        parts.append(", ".join(ended.values()))
        log.info(labels.line("result", " · ".join(parts)))
        log.info(labels.line("next", self._next_command(trainer, best)))
        return metrics

    def _result_parts(
        self,
        trainer: pl.Trainer,
        monitor: TrainingMonitor,
        metrics: dict[str, float],
        seconds: float,
        peak_bytes: int,
    ) -> list[str]:
        """Return the parts of the printed result line: steps, metrics, speed, memory, warnings.

        A part that does not apply is left out, such as the steps of an evaluation.

        Args:
            trainer: Trainer of the run, after its end.
            monitor: TrainingMonitor of the run, which knows the first step and the speed.
            metrics: Final value of each logged metric by its logged name.
            seconds: Time since `start`.
            peak_bytes: Largest peak memory of any rank.
        """
        parts = []
        first_step = monitor.first_step  # None if this was no fit, or if no step was left
        if first_step is not None:
            n_steps = labels.count_text(trainer.global_step - first_step, "step")
            done = f"{n_steps} in {seconds:.0f} s"
            if first_step:
                done += f", from step {first_step} to {trainer.global_step}"
            parts.append(done)
        chosen = self.hyper_parameters["objective"], self.hyper_parameters["checkpoint"]["monitor"]
        parts += metric_parts(metrics, chosen)
        if "perf/tokens_per_s" in metrics:
            parts.append(f"{metrics['perf/tokens_per_s']:,.0f} {monitor.lengths.unit}/s")
        if "perf/mfu" in metrics:
            parts.append(f"mfu {metrics['perf/mfu']:.2f} of {monitor.speed.peak}")
        if first_step is not None and (slow := waiting_line(trainer, monitor.speed)):
            parts.append(slow)
        per_rank = " per rank" if trainer.world_size > 1 else ""
        parts.append(f"peak memory {peak_bytes / 2**30:.2f} GiB{per_rank}")
        if files := profile_files(trainer, self.start_time_s):
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            parts.append(f"profile {files[0]}{more}")
        if n_missing := monitor.missing_targets.n_steps:
            parts.append(f"{labels.count_text(n_missing, 'step')} without a target")
        return parts

    def _next_command(self, trainer: pl.Trainer, best: Path | None) -> str:
        """Return the commands for the line `next`: evaluate the best checkpoint, show the curves.

        The evaluation is a test, or a validation if the module has no `test_step` or the data
        module no `test_dataloader`. It is left out if neither is possible, or without a checkpoint.
        Under fast_dev_run the result is a sentence instead.

        Args:
            trainer: Trainer of the run, after its end.
            best: Folder of the best checkpoint. None if the run has none.
        """
        if is_fast_dev_run(trainer):
            return "every part works; run it without trainer.fast_dev_run"
        tensorboard = shell.command("tensorboard", "--logdir", shell.folder_argument(self.run_dir))
        if best is None:
            return tensorboard
        module = trainer.lightning_module
        datamodule = trainer.datamodule  # ty: ignore[missing-attribute]
        steps = {"test": "test_step", "validate": "validation_step"}
        offered = (task for task in steps if has_loader(datamodule, task))
        task = next((task for task in offered if is_overridden(steps[task], module)), None)
        if task is None:
            return tensorboard
        words = [shell.override("from_run", self.run_dir), f"task={task}", *self.repeated_overrides]
        return f"{shell.train_command(*words)}; {tensorboard}"


def metric_parts(metrics: dict[str, float], chosen: Sequence[str]) -> list[str]:
    """Return the parts of the result line about losses and metrics, such as `val/loss 1.2345`.

    Only names that begin with `train/loss`, `val/`, `test/`, `eval/` or a chosen name are shown. A
    metric with more than MAX_ELEMENTS elements, such as `val/f1/0` to `val/f1/63`, becomes one part
    without its values: `val/f1 64 values in result.json`.

    Args:
        metrics: Final value of each logged metric by its logged name.
        chosen: Names of the objective and of the metric that ranks the checkpoints.
    """
    shown = ("train/loss", "val/", "test/", "eval/", *chosen)
    names = [name for name in metrics if name.startswith(shown)]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(/\d+)+$", "", name), []).append(name)
    parts = []
    for group, elements in groups.items():
        if len(elements) > MAX_ELEMENTS:
            parts.append(f"{group} {len(elements)} values in {RESULT_NAME}")
        else:
            parts += [f"{name} {metrics[name]:.4f}" for name in elements]
    return parts


def best_checkpoint(trainer: pl.Trainer) -> Path | None:
    """Return the folder of the checkpoint with the best value of checkpoint.monitor.

    Returns the newest checkpoint if none has this metric, and None if there is no checkpoint or the
    run does not save any, as in an evaluation. The checkpoint is not verified.

    Args:
        trainer: Trainer of the run.

    Raises:
        OSError: If the folder of the checkpoints exists and cannot be read.
    """
    checkpoints = find_callback(trainer, Checkpoints)
    if checkpoints is None:
        return None
    ranking = checkpoints.ranking()
    return ranking[0] if ranking else checkpoints.store.newest()


def waiting_line(trainer: pl.Trainer, speed: Speed) -> str:
    """Return a sentence if training waited for data too long, else an empty string.

    The limit is MAX_WAIT_FRACTION of the training time. The sentence advises a higher
    data.num_workers, unless there are as many workers as CPUs. The result is empty for a user's own
    LightningDataModule, whose waits are not measured.

    Args:
        trainer: Trainer of the run, after a fit.
        speed: Measured training time, and the part of it in which training waited for batches.
    """
    fraction = speed.waited_s / speed.trained_s if speed.trained_s else 0.0
    loader = train_loader_of(trainer)
    if fraction <= MAX_WAIT_FRACTION or loader is None:
        return ""
    n_workers = loader.num_workers
    n_cpus = os.cpu_count() or 1
    line = f"{100 * fraction:.0f} % of the time waited for data"
    if n_workers >= n_cpus:
        return f"{line} of data.num_workers={n_workers}, on {n_cpus} CPUs"
    return f"{line}; try data.num_workers={2 * n_workers or 2}"


def profile_files(trainer: pl.Trainer, since_s: float) -> list[Path]:
    """Return the files that the Trainer's profiler has written in this run, its text report first.

    The list is empty without a profiler, and for a profiler without `dirpath` or `filename`.

    Args:
        trainer: Trainer of the run, with or without a profiler.
        since_s: Value of `time.time()` when the run started. Older files belong to another run.
    """
    profiler = profiler_of(trainer)
    folder = getattr(profiler, "dirpath", None)  # a user's profiler may have neither attribute
    name = getattr(profiler, "filename", None)
    if not folder or not name:
        return []
    matches = Path(folder).glob(f"*{glob.escape(name)}*")
    new = [path for path in matches if path.stat().st_mtime >= since_s]
    return sorted(new, key=lambda path: (path.suffix != ".txt", path.name))


def find_callback(trainer: pl.Trainer, kind: type[CallbackT]) -> CallbackT | None:
    """Return the trainer's first callback that is an instance of a class, or None.

    Args:
        trainer: Trainer of the run.
        kind: Class of the callback. Subclasses match, too.
    """
    return next((part for part in callbacks_of(trainer) if isinstance(part, kind)), None)

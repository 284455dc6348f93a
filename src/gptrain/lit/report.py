"""The lines that a run prints at its start and at its end, and result.json."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from gptrain.checkpoints import timeline
from gptrain.checkpoints.status import RESULT_NAME, write_result
from gptrain.core import labels, shell
from gptrain.lit.callbacks.monitor import TrainingMonitor
from gptrain.lit.lightning import callbacks_of, data_of, is_fast_dev_run, strategy_of
from gptrain.lit.loggers import STEP
from gptrain.lit.perf import peak_memory_bytes
from gptrain.lit.user_data import has_loader
from gptrain.parallel.mesh import gather

log = logging.getLogger(__name__)
MAX_SHOWN = 12  # largest number of metrics in the result line
TASK_STEPS = {"test": "test_step", "validate": "validation_step"}


@dataclass
class Report:
    """Describes one run to the user and to the loggers. All ranks have one; rank 0 prints.

    Attributes:
        lines: Label -> text of the lines that are printed at the start, in this order.
        hyper_parameters: The config as plain values, for the loggers. The additional key `typed`
            holds the overrides, key -> value, that distinguish this run from other runs.
        facts: Further entries of result.json: versions, hardware and the overrides of the run.
        start_s: Value of `time.perf_counter()` when the run started.
    """

    lines: dict[str, str]
    hyper_parameters: dict[str, Any]
    facts: dict[str, Any]
    start_s: float = 0.0

    @property
    def run_dir(self) -> Path:
        """Output folder of the run."""
        return Path(self.hyper_parameters["run_dir"])

    def start(self, trainer: pl.Trainer) -> None:
        """Start the clock, print `lines` and log the hyperparameters.

        On a GPU the measurement of the peak memory begins again. All ranks must call this method
        before the Trainer runs; only rank 0 prints.

        Args:
            trainer: Trainer of the run.
        """
        self.start_s = time.perf_counter()
        if strategy_of(trainer).root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if trainer.is_global_zero:
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
        monitor = next(part for part in callbacks_of(trainer) if isinstance(part, TrainingMonitor))
        checkpoints = monitor.checkpoints
        best = None
        if checkpoints is not None:
            best = next(iter(checkpoints.ranking()), None) or checkpoints.store.newest()
        ended = monitor.ended or {
            "reason": f"{cast(TrainerFn, trainer.state.fn).value} done",
            "detail": f"of {trainer.ckpt_path or 'the initial weights'}",
        }
        path = self.run_dir / RESULT_NAME
        first_step = monitor.first_step  # None if this was no fit, or if no step was left
        goodput = monitor.timeline.end(trainer.global_step)
        has_worked = first_step is not None or trainer.state.fn != "fit" or not path.exists()
        if has_worked and not is_fast_dev_run(trainer):
            n_missing = monitor.step_guard.n_without_target
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
        parts = []
        if first_step is not None:
            n_steps = labels.count_text(trainer.global_step - first_step, "step")
            resumed = f", from step {first_step} to {trainer.global_step}" if first_step else ""
            parts.append(f"{n_steps} in {seconds:.0f} s{resumed}")
        parts += self._metric_parts(metrics)
        if "perf/tokens_per_s" in metrics:
            parts.append(f"{metrics['perf/tokens_per_s']:,.0f} {monitor.lengths.unit}/s")
        if "perf/mfu" in metrics:
            parts.append(f"mfu {metrics['perf/mfu']:.2f} of {monitor.speed.peak}")
        per_rank = " per rank" if trainer.world_size > 1 else ""
        parts.append(f"peak memory {peak_bytes / 2**30:.2f} GiB{per_rank}")
        if n_missing := monitor.step_guard.n_without_target:
            parts.append(f"{labels.count_text(n_missing, 'step')} without a target")
        if goodput:
            parts.append(timeline.describe(goodput))
        parts.append(", ".join(ended.values()))
        log.info(labels.line("result", " · ".join(parts)))
        log.info(labels.line("next", self._next_command(trainer, best)))
        return metrics

    def _metric_parts(self, metrics: dict[str, float]) -> list[str]:
        """Return the parts of the result line about losses and metrics, such as `val/loss 1.2`."""
        chosen = self.hyper_parameters["objective"], self.hyper_parameters["checkpoint"]["monitor"]
        shown = ("train/loss", "val/", "test/", "eval/", *chosen)
        parts = [f"{name} {metrics[name]:.4f}" for name in metrics if name.startswith(shown)]
        if len(parts) > MAX_SHOWN:
            parts[MAX_SHOWN:] = [f"{len(parts) - MAX_SHOWN} more values in {RESULT_NAME}"]
        return parts

    def _next_command(self, trainer: pl.Trainer, best: Path | None) -> str:
        """Return the commands for the line `next`: evaluate the best checkpoint, show the curves."""
        if is_fast_dev_run(trainer):
            return "every part works; run it without trainer.fast_dev_run"
        tensorboard = shell.command("tensorboard", "--logdir", shell.folder_argument(self.run_dir))
        module = trainer.lightning_module
        datamodule = trainer.datamodule  # ty: ignore[missing-attribute]
        tasks = [
            task
            for task, step in TASK_STEPS.items()
            if has_loader(datamodule, task) and is_overridden(step, module)
        ]
        if best is None or not tasks:
            return tensorboard
        run = shell.override("from_run", self.run_dir)
        command = shell.train_command(run, f"task={tasks[0]}")
        return f"{command}; {tensorboard}"

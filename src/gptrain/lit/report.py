"""The lines that a run prints at its start and at its end, and result.json."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from gptrain.checkpoints import timeline
from gptrain.checkpoints.status import RESULT_NAME, write_result
from gptrain.core import labels, shell
from gptrain.core.lengths import RunLengths
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
    """

    lines: dict[str, str]
    hyper_parameters: dict[str, Any]
    facts: dict[str, Any]
    _start_s: float = 0.0

    def start(self, trainer: pl.Trainer) -> None:
        """Start the clock, print `lines` and log the hyperparameters, before the Trainer runs."""
        self._start_s = time.perf_counter()
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
        overwrite one that exists. All ranks must call this method after the Trainer has run.

        Raises:
            OSError: On rank 0, if result.json cannot be written, or the checkpoints cannot be read.
        """
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics.pop(STEP, None)  # the x axis of the loggers
        peak_bytes = max(gather(peak_memory_bytes(strategy_of(trainer).root_device)))
        if not trainer.is_global_zero:
            return metrics
        seconds = time.perf_counter() - self._start_s
        monitor = next(part for part in callbacks_of(trainer) if isinstance(part, TrainingMonitor))
        checkpoints = monitor.checkpoints
        best = None
        if checkpoints is not None:
            best = next(iter(checkpoints.ranking()), None) or checkpoints.store.newest()
        first_step = monitor.first_step  # None if this was no fit, or if no step was left
        ended = why_ended(trainer, monitor.lengths, first_step)
        path = Path(self.hyper_parameters["run_dir"]) / RESULT_NAME
        goodput = monitor.timeline.end(trainer.global_step)
        has_worked = first_step is not None or trainer.state.fn != "fit" or not path.exists()
        if has_worked and not is_fast_dev_run(trainer):
            write_result(
                path,
                metrics,
                steps=trainer.global_step,
                tokens=data_of(trainer).tokens,
                seconds=seconds,
                checkpoint=best,
                ended=ended,
                peak_memory_bytes=peak_bytes,
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
        if "perf/mfu" in metrics and monitor.speed.peak:
            parts.append(f"mfu {metrics['perf/mfu']:.2f} of {monitor.speed.peak[1]}")
        per_rank = " per rank" if trainer.world_size > 1 else ""
        parts.append(f"peak memory {peak_bytes / 2**30:.2f} GiB{per_rank}")
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
        """Return the commands for the line `next`: evaluate the best checkpoint, show the curves.

        A run without a checkpoint, a step or a loader for an evaluation shows the curves only.
        """
        if is_fast_dev_run(trainer):
            return "every part works; run it without trainer.fast_dev_run"
        run_dir = self.hyper_parameters["run_dir"]
        tensorboard = shell.command("tensorboard", f"--logdir={run_dir}")
        datamodule = trainer.datamodule  # ty: ignore[missing-attribute]
        tasks = [
            task
            for task, step in TASK_STEPS.items()
            if has_loader(datamodule, task) and is_overridden(step, trainer.lightning_module)
        ]
        if best is None or not tasks:
            return tensorboard
        run = shell.override("from_run", run_dir)
        return f"{shell.train_command(run, f'task={tasks[0]}')}; {tensorboard}"


def why_ended(trainer: pl.Trainer, lengths: RunLengths, first_step: int | None) -> dict[str, str]:
    """Return `reason` and `detail` of the end of a run without an error.

    The reasons are "steps done", "epochs done", "tokens done", "max_time", "early stop", "stopped",
    "nothing left to train", "validate done" and "test done". The detail is the option that set the
    length of the run, or else the last step, with the metric that stopped the run or a hint.

    Args:
        trainer: Trainer of the run, at its end.
        lengths: Lengths of the run.
        first_step: Number of steps done when training started. None if it did not start.
    """
    step = trainer.global_step
    detail = f"at step {step}"
    timers = [part for part in callbacks_of(trainer) if isinstance(part, Timer)]
    early = [part for part in trainer.early_stopping_callbacks if part.stopping_reason.value]
    if first_step is None and trainer.state.fn != "fit":
        reason = f"{cast(TrainerFn, trainer.state.fn).value} done"
        detail = f"of {trainer.ckpt_path or 'the initial weights'}"
    elif first_step is None:
        reason = "nothing left to train"
        limits = "trainer.max_steps or trainer.max_epochs"
        detail = f"step {step} is the last step of the run; to train further, raise {limits}"
    elif step == lengths.n_steps:
        reason = f"{lengths.limit_kind} done"
        detail = lengths.limit
    elif any((timer.time_remaining() or 1.0) <= 0 for timer in timers):
        reason = "max_time"
    elif early:
        metric = early[0].monitor
        why = early[0].stopping_reason.name.lower().replace("_", " ")
        reason = "early stop"
        detail = f"{metric}={trainer.callback_metrics[metric]:.4g} {why}, {detail}"
    else:
        reason = "stopped"
        detail = f"by a callback or the module (trainer.should_stop), {detail}"
    return {"reason": reason, "detail": detail}

"""What a run tells a person: five lines at the start, a few at the end; and result.json."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import OmegaConf

from gptrain import shell
from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.steps import STEP, Steps
from gptrain.lit.lightning import connected, data_of
from gptrain.resilience import fileops
from gptrain.resilience.status import RESULT_NAME, to_json, write_result

log = logging.getLogger(__name__)


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

    @property
    def run_dir(self) -> Path:
        return Path(self.hyper_parameters["run_dir"])

    def start(self, trainer: pl.Trainer) -> None:
        """Prints what will run, with what, on how much, and where to; tells it to the loggers."""
        self.start_s = time.perf_counter()
        if trainer.is_global_zero:
            if self.hyper_parameters["print_config"]:
                config = {k: v for k, v in self.hyper_parameters.items() if k != "typed"}
                log.info(OmegaConf.to_yaml(config))
            for label, line in self.lines.items():
                log.info("%-9s %s", label, line)
            if self.planned is not None:
                fileops.replace(self.run_dir / "plan.json", to_json(self.planned))
        for logger in trainer.loggers:
            logger.log_hyperparams(self.hyper_parameters)

    def end(self, trainer: pl.Trainer) -> dict[str, float]:
        """Prints the result and what to type next, and writes result.json; returns the metrics."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics.pop(STEP, None)
        if not trainer.is_global_zero:
            return metrics
        seconds = time.perf_counter() - self.start_s
        steps = find_callback(trainer, Steps)
        checkpoints = find_callback(trainer, Checkpoints)
        best = checkpoints and [*checkpoints.ranking(), checkpoints.store.newest()][0]
        path = self.run_dir / RESULT_NAME
        ended = steps.ended or {
            "reason": f"{cast(TrainerFn, trainer.state.fn).value} done",
            "detail": f"of {trainer.ckpt_path or 'the weights that it began with'}",
        }
        first = steps.first_step
        is_new = first is not None or trainer.state.fn != "fit"
        if not connected(trainer).fast_dev_run and (is_new or not path.exists()):
            write_result(
                path,
                metrics,
                steps=trainer.global_step,
                tokens=data_of(trainer).tokens,
                seconds=seconds,
                checkpoint=best,
                ended=ended,
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
            parts.append(f"{metrics['perf/tokens_per_s']:,.0f} tokens/s")
        if "perf/mfu" in metrics:
            parts.append(f"mfu {metrics['perf/mfu']:.2f} of {steps.speed.peak}")
        parts.append(", ".join(ended.values()))
        log.info("%-9s %s", "result", " · ".join(parts))
        log.info("%-9s %s", "next", self._next(trainer, best))
        return metrics

    def _next(self, trainer: pl.Trainer, best: Path | None) -> str:
        if connected(trainer).fast_dev_run:
            return "every part works; run it without trainer.fast_dev_run"
        words = [shell.override("from_run", self.run_dir), "task=test", *self.outside]
        shown = shell.command("tensorboard", "--logdir", shell.folder_argument(self.run_dir))
        return f"{shell.train_command(*words)} · {shown}" if best else shown


def find_callback(trainer: pl.Trainer, kind: type[pl.Callback]) -> Any:
    """The run's callback of that class, None where it has none."""
    return next((part for part in connected(trainer).callbacks if isinstance(part, kind)), None)

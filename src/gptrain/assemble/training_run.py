"""One run in one rank: its parts, what it prints at its start and its end, and result.json."""

import functools
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.utilities.model_helpers import is_overridden

from gptrain.assemble.config_errors import as_config_errors
from gptrain.assemble.module import peak_lr
from gptrain.checkpoints import files, goodput
from gptrain.checkpoints.status import RESULT_NAME
from gptrain.core import labels, shell
from gptrain.core.lengths import RunLengths
from gptrain.core.locations import LIBRARY, find_project
from gptrain.core.schema import RunConfig
from gptrain.lit.callbacks.monitor import TrainingMonitor
from gptrain.lit.lightning import callbacks_of, data_of, strategy_of
from gptrain.lit.loggers import STEP
from gptrain.lit.messages import misconfiguration_as_config_error
from gptrain.lit.module import LanguageModel
from gptrain.lit.perf import peak_memory_bytes
from gptrain.lit.user_data import LOADERS
from gptrain.parallel.mesh import gather

log = logging.getLogger(__name__)
# Arguments of the net that are printed, if it has them
_SIZES = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")
_PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "torchmetrics", "numpy")
_TASK_STEPS = {"test": "test_step", "validate": "validation_step"}


@dataclass
class TrainingRun:
    """All parts of one run, in one rank, as `build` makes them.

    Attributes:
        cfg: Configuration of the run, with its resolved precision and compile mode.
        lengths: Length of the run.
        train: Training set, or the UserData of a LightningDataModule.
        module: LightningModule of the run.
        datamodule: Data of the run, for the Trainer.
        trainer: Lightning's Trainer, with the checkpoint that it loads.
    """

    cfg: RunConfig
    lengths: RunLengths
    train: Any
    module: pl.LightningModule
    datamodule: pl.LightningDataModule
    trainer: pl.Trainer

    def go(self) -> dict[str, float]:
        """Fit, validate or test, as `task` says, and return the final metrics. Call it once.

        All ranks must call it. Rank 0 logs lines at the start and at the end, and writes
        result.json, except under fast_dev_run. A fit that has no step left keeps an earlier
        result.json. fast_dev_run fits and then tests, if the module has a test_step and the data a
        test loader.

        Returns:
            Logged name -> last value, on every rank.

        Raises:
            PreemptedError: If the run was asked to stop, after a save if it has checkpoints.
            RefusedStepError: If the run ends because of non-finite values or spikes.
            SaveFailedError: If a checkpoint cannot be written.
            OSError: On rank 0, if result.json cannot be written, or the checkpoints cannot be read.
            ConfigError: If Lightning or a part refuses an option only now.
        """
        cfg, trainer, start_s = self.cfg, self.trainer, time.perf_counter()
        if strategy_of(trainer).root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        provenance = _describe_run(trainer) if trainer.is_global_zero else {}
        for label, text in self._start_lines() if trainer.is_global_zero else ():
            log.info(labels.line(label, text))
        for logger in trainer.loggers:
            logger.log_hyperparams(cfg.plain())
        with as_config_errors(cfg), misconfiguration_as_config_error():
            if cfg.task == "fit":
                trainer.fit(self.module, datamodule=self.datamodule)
            if cfg.task == "validate":
                trainer.validate(self.module, datamodule=self.datamodule, verbose=False)
            if cfg.task == "test" or (cfg.trainer.fast_dev_run and self._has("test")):
                # Keep the metrics of the fit under fast_dev_run.
                fitted = dict(trainer.callback_metrics)
                trainer.test(self.module, datamodule=self.datamodule, verbose=False)
                trainer.callback_metrics.update(fitted)
        return self._end(start_s, provenance)

    def _has(self, task: str) -> bool:
        """Return whether the module has a step for a task, and the data a loader."""
        is_implemented = is_overridden(_TASK_STEPS[task], self.module)
        return is_implemented and is_overridden(LOADERS[task], self.datamodule)

    def _start_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the label and the text of each line that is printed at the start."""
        cfg, lengths, batch = self.cfg, self.lengths, self.lengths.batch
        used = strategy_of(self.trainer)
        net, sizes = used.full_net, cfg.model.arguments
        if not isinstance(getattr(self.module, "net", None), torch.nn.Module):  # layers of its own
            net, sizes = self.module, {}
        n_all = sum(parameter.numel() for parameter in net.parameters())
        n_trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
        some = f"{n_trained:,} of {n_all:,} parameters are trained"
        model = [type(net).__name__, some if n_trained < n_all else f"{n_all:,} parameters"]
        model += [f"{key} {sizes[key]}" for key in _SIZES if key in sizes]
        yield "model", " · ".join(model)
        device_text = f"{self.trainer.world_size} x {used.root_device.type}"
        strategy = [used.parallel.name, device_text, f"precision {self.trainer.precision}"]
        if used.root_device.type == "cpu":
            strategy.append(labels.count_text(torch.get_num_threads(), "thread"))
        yield "strategy", " · ".join(strategy)
        parts = [f"{batch.batch_size} x {batch.data_parallel_size} ranks"]
        if cfg.task == "fit":
            if describe := getattr(self.train, "describe", None):
                yield "data", describe((lengths.n_steps or 0) * batch.global_batch_size)
            is_text = lengths.unit == "tokens"
            unit = f"sequences = {lengths.step_tokens} tokens" if is_text else "samples"
            size = f"{batch.accumulate} accumulated = {batch.global_batch_size} {unit} per step"
            steps = labels.count_text(lengths.n_steps or 0, "step")
            parts[0] += f" x {size}"
            parts.append("no end" if lengths.n_steps is None else f"{steps} by {lengths.limit}")
            uses_lr = type(self.module).configure_optimizers is LanguageModel.configure_optimizers
            if uses_lr and (lr := peak_lr(cfg, batch)) is not None:
                parts.append(f"lr {lr:g}")
        yield "batch", " · ".join(parts)
        yield "run", cfg.run_dir

    def _end(self, start_s: float, provenance: dict[str, Any]) -> dict[str, float]:
        """Print the result and write result.json on rank 0; return the metrics. Collective."""
        cfg, trainer, step = self.cfg, self.trainer, self.trainer.global_step
        # STEP is the x axis of the loggers.
        metrics = {n: float(value) for n, value in trainer.callback_metrics.items() if n != STEP}
        peak_bytes = max(gather(peak_memory_bytes(strategy_of(trainer).root_device)))
        if not trainer.is_global_zero:
            return metrics
        seconds = time.perf_counter() - start_s
        monitor = next(part for part in callbacks_of(trainer) if isinstance(part, TrainingMonitor))
        best = None
        if (checkpoints := monitor.checkpoints) is not None:
            best = next(iter(checkpoints.ranking()), None) or checkpoints.store.newest()
        first_step = monitor.first_step  # None if this was no fit, or if no step was left
        reason, detail = self._why_ended(first_step)
        path = Path(cfg.run_dir) / RESULT_NAME
        monitor.guard.beat()  # counts the time until now
        has_trained = first_step is not None and not cfg.trainer.fast_dev_run
        times = goodput.measure(monitor.guard.phase_s) if has_trained else {}
        has_worked = first_step is not None or cfg.task != "fit" or not path.exists()
        if has_worked and not cfg.trainer.fast_dev_run:
            result = {
                "metrics": metrics,
                "steps": step,
                "tokens": data_of(trainer).tokens,
                "seconds": seconds,
                "checkpoint": best,
                "ended": {"reason": reason, "detail": detail},
                "peak_memory_bytes": peak_bytes,
            }
            files.replace(path, files.to_json(result | times | provenance))
        parts = []
        if first_step is not None:
            resumed = f", from step {first_step} to {step}" if first_step else ""
            n_steps = labels.count_text(step - first_step, "step")
            parts.append(f"{n_steps} in {seconds:.0f} s{resumed}")
        shown = ("train/loss", "val/", "test/", "eval/", cfg.objective, cfg.checkpoint.monitor)
        parts += [f"{name} {metrics[name]:.4f}" for name in metrics if name.startswith(shown)]
        if "perf/tokens_per_s" in metrics:
            parts.append(f"{metrics['perf/tokens_per_s']:,.0f} {self.lengths.unit}/s")
        if "perf/mfu" in metrics and monitor.speed.peak:
            parts.append(f"mfu {metrics['perf/mfu']:.2f} of {monitor.speed.peak[1]}")
        per_rank = " per rank" if trainer.world_size > 1 else ""
        parts.append(f"peak memory {peak_bytes / 2**30:.2f} GiB{per_rank}")
        if times:
            parts.append(goodput.describe(times))
        parts.append(f"{reason}, {detail}")
        log.info(labels.line("result", " · ".join(parts)))
        log.info(labels.line("next", self._next_command(has_checkpoint=best is not None)))
        return metrics

    def _next_command(self, has_checkpoint: bool) -> str:
        """Return the commands that evaluate the best checkpoint and show the curves."""
        if self.cfg.trainer.fast_dev_run:
            return "every part works; run it without trainer.fast_dev_run"
        tensorboard = shell.command("tensorboard", f"--logdir={self.cfg.run_dir}")
        for task in filter(self._has, _TASK_STEPS) if has_checkpoint else ():
            run = shell.override("from_run", self.cfg.run_dir)
            return f"{shell.train_command(run, f'task={task}')}; {tensorboard}"
        return tensorboard

    def _why_ended(self, first_step: int | None) -> tuple[str, str]:
        """Return the reason and the detail of the end of a run without an error."""
        trainer, step = self.trainer, self.trainer.global_step
        if self.cfg.task != "fit":
            return f"{self.cfg.task} done", f"of {trainer.ckpt_path or 'the initial weights'}"
        if first_step is None:
            detail = f"step {step} is the last step of the run; to train further, raise "
            return "nothing left to train", f"{detail}trainer.max_steps or trainer.max_epochs"
        if step == self.lengths.n_steps:
            # trainer.max_steps=6: steps
            unit = self.lengths.limit.partition("=")[0].rpartition("_")[2]
            return f"{unit} done", self.lengths.limit
        for part in callbacks_of(trainer):
            if isinstance(part, Timer) and (part.time_remaining() or 1.0) <= 0:
                return "max_time", f"at step {step}"
            if isinstance(part, EarlyStopping) and part.stopping_reason_message:
                return "early stop", f"at step {step}: {part.stopping_reason_message}"
        return "stopped", f"by a callback or the module (trainer.should_stop), at step {step}"


def _describe_run(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the provenance of a run that is about to start, for result.json."""
    device = strategy_of(trainer).root_device.type
    name = torch.cuda.get_device_name() if device == "cuda" else f"{device} ({platform.machine()})"
    return {
        "command": shell.command("python", *sys.argv),
        "git": _read_git(find_project() or LIBRARY),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in _PACKAGES},
        "devices": f"{trainer.world_size} x {name}",
        "threads": torch.get_num_threads(),
    }


@functools.cache  # the code of this process was imported once and does not change
def _read_git(folder: Path) -> dict[str, object] | None:
    """Return `commit` and `dirty` (changed files) of the repository of a folder, or None."""
    command = ["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain=v2", "-b"]
    try:  # git may be slow on a network file system
        output = subprocess.run(command, capture_output=True, check=True, timeout=3).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    # "# branch.oid 0123abcd", more headers, changed files
    head, *lines = output.decode().splitlines()
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"commit": head.removeprefix("# branch.oid "), "dirty": is_dirty}

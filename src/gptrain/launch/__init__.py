"""Starts a job: in this process where it has one device, else in ranks that the parent watches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gptrain.config.problems import FOLDER_UNUSABLE, JobFailed
from gptrain.config.process import this_process
from gptrain.resilience.lock import RunFolderHeld, RunLock
from gptrain.resilience.status import clear_status

__all__ = ["run"]


def run(train: Callable, cfg: DictConfig) -> dict[str, float]:
    """Runs one job to its end, alone in its folder, and returns its metrics.

    Args:
        train: (cfg, guard) -> metrics; runs in every rank.

    Raises:
        JobFailed: with the exit code, after the reason has been printed.
    """
    from gptrain.config.machine import find_machine  # torch

    cfg = settle(cfg)
    process, machine = this_process(), find_machine(cfg)
    try:
        with RunLock(cfg.run_dir) if process.rank == 0 else nullcontext():
            if process.rank == 0:
                clear_status(cfg.run_dir)
            if process.is_rank or machine.n_local == 1:
                from gptrain.launch.rank import run_rank

                return run_rank(train, cfg)
            from gptrain.launch.local import supervise

            return supervise(train, cfg, machine.n_local)
    except RunFolderHeld as held:
        print(f"error: run_dir={held}", flush=True)
        raise JobFailed(FOLDER_UNUSABLE, str(held)) from held


def settle(cfg: DictConfig) -> DictConfig:
    """The job's own config: every reference resolved, run_dir the folder that Hydra made for it."""
    cfg = cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    cfg.run_dir = str(Path(HydraConfig.get().runtime.output_dir))
    OmegaConf.resolve(cfg)
    return cfg

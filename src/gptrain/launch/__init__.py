"""Starts a job: in this process where it has one device, else in ranks that the parent watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gptrain.launch.process import this_process
from gptrain.problems import FOLDER_UNUSABLE, JobFailed
from gptrain.resilience.lock import RunFolderHeld, RunLock
from gptrain.resilience.signals import StopFlag

__all__ = ["run"]


def run(train: Callable, cfg: DictConfig) -> dict[str, float]:
    """Runs one job to its end, alone in its folder, and returns its metrics.

    Args:
        train: (cfg, guard) -> metrics; runs in every rank.

    Raises:
        JobFailed: with the exit code, after the reason has been printed.
        ConfigError: it does not fit what is in its folder; nothing was started or changed.
    """
    composed, cfg, process = cfg, settle(cfg), this_process()
    with StopFlag() as stop:
        from gptrain.launch.devices import find_machine  # torch
        from gptrain.launch.net import check_net

        machine = find_machine(cfg)
        check_net(cfg, machine.world_size)
        if process.launcher == "torchrun":
            from gptrain.launch.torchrun import meet_at_a_file

            meet_at_a_file()
        if process.launcher == "slurm":
            from gptrain.launch.slurm import meet

            meet()
        if process.rank > 0:  # rank 0 holds the folder, and tells where to start
            return _in_this_process(train, cfg, stop)
        with _held_folder(cfg) as lock:
            from gptrain.launch.start import keep_config, prepare

            prepare(cfg, lock.run_id, machine.world_size)
            keep_config(cfg.run_dir, composed)
            if process.is_rank or machine.n_local == 1 or stop:  # asked already: no rank starts
                return _in_this_process(train, cfg, stop)
            from gptrain.launch.local import supervise

            return supervise(train, cfg, machine, lock.run_id, stop)


def settle(cfg: DictConfig) -> DictConfig:
    """The job's own config: every reference resolved, run_dir the folder that Hydra made for it."""
    cfg = cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    cfg.run_dir = str(Path(HydraConfig.get().runtime.output_dir))
    OmegaConf.resolve(cfg)
    return cfg


def _in_this_process(train: Callable, cfg: DictConfig, stop: StopFlag) -> dict[str, float]:
    from gptrain.launch.rank import leave, run_rank

    try:
        return run_rank(train, cfg, stop=stop)
    except JobFailed as failure:
        if this_process().is_rank:
            leave(failure.code)
        raise


@contextmanager
def _held_folder(cfg: DictConfig) -> Iterator[RunLock]:
    """The run folder, held; it is free again when the process ends, however that ends."""
    lock = RunLock(cfg.run_dir)
    try:
        lock.acquire()
    except (RunFolderHeld, OSError) as error:
        print(f"error: run_dir={error}", file=sys.stderr, flush=True)
        raise JobFailed(FOLDER_UNUSABLE, str(error)) from error
    try:
        yield lock
    finally:
        lock.release()

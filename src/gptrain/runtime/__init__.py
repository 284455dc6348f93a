"""Start a job: in this process if it has one device, else in ranks that this process watches.

process     which process this is, and where ranks meet
devices     what it runs on
supervisor  the parent of local ranks
rank        what surrounds the training function in each of them
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from gptrain.checkpoints import fileops
from gptrain.checkpoints.lock import LOST_HOST_S, NAMED_AFTER_S, RunLock
from gptrain.checkpoints.signature import read_signed_record, remove_signature, sign_record
from gptrain.core import locations
from gptrain.core.schema import RunConfig
from gptrain.runtime.process import this_process
from gptrain.runtime.signals import StopFlag, die_with_parent

__all__ = ["run"]


def run(train: Callable, cfg: RunConfig, find_checkpoint: Callable) -> dict[str, float]:
    """Run one job to its end, as the only run in its folder, and return its metrics.

    Args:
        train: Function (cfg, guard) -> metrics, which runs in every rank.
        find_checkpoint: Function (cfg, lock, world_size) -> folder of the verified checkpoint to
            resume from, or None. The process that holds the run folder calls it before any rank
            starts, and again before a restart.

    Raises:
        JobFailedError: If the job fails, after the reason has been printed. It has the exit code.
        ConfigError: If the config does not fit the content of its folder, or if another run holds
            the folder. Nothing was started or changed.
    """
    process = this_process()
    with StopFlag() as stop:
        from gptrain.runtime.devices import find_devices  # torch
        from gptrain.runtime.rank import remove_old_starts, run_rank, start_log
        from gptrain.runtime.supervisor import is_restart, prepare_start, supervise

        machine, again = find_devices(cfg), is_restart()
        if process.rank > 0:  # rank 0 holds the folder, and sends the checkpoint's path
            report_folder(cfg.run_dir)
            return run_rank(train, cfg, stop)
        # The lock is free again when this process ends, however it ends.
        with RunLock(cfg.run_dir, LOST_HOST_S if again else NAMED_AFTER_S) as lock:
            start_log()
            cfg = prepare_start(cfg, find_checkpoint, lock, machine.world_size, again)
            remove_old_starts(cfg.run_dir)
            keep_config(cfg)
            report_folder(cfg.run_dir)
            if process.is_rank or machine.n_local == 1 or stop:  # asked already: no rank starts
                return run_rank(train, cfg, stop)
            again = partial(
                prepare_start, cfg, find_checkpoint, lock, machine.world_size, again=True
            )
            return supervise(train, cfg, machine.n_local, again, stop)


def report_folder(run_dir: str) -> None:
    """Report the folder of the run that starts to `gptrain.fit`, if that started this process.

    If the process of `gptrain.fit` ends before the run, the run is asked to save and to stop.
    """
    if locations.REPORT_VARIABLE in os.environ:
        die_with_parent(os.getppid(), signal.SIGTERM)
        locations.report_to_fit(folder=str(run_dir))


def keep_config(cfg: RunConfig) -> None:
    """Write Hydra's record of a run and sign it.

    Hydra would write the record before the folder is held. Written here, a start that is refused
    leaves the record of the run in that folder alone. A run that takes its words from an untrusted
    run is not signed: they are not the words of this user.
    """
    from hydra.core.hydra_config import HydraConfig  # here, so that `gptrain.runs` starts fast
    from omegaconf import OmegaConf

    folder, hydra = Path(cfg.run_dir) / ".hydra", cast(Any, HydraConfig.instance().cfg)
    folder.mkdir(exist_ok=True)
    records = {"config": cfg.plain(), "hydra": hydra, "overrides": hydra.hydra.overrides.task}
    for name, record in records.items():
        fileops.replace(folder / f"{name}.yaml", OmegaConf.to_yaml(record).encode())
    if cfg.from_run and read_signed_record(Path(cfg.from_run).expanduser()) is None:
        remove_signature(cfg.run_dir)
    else:
        sign_record(cfg.run_dir)

"""Start, watch and end the processes of a job.

`run` trains in this process if the job has one device, or if a launcher has started this process as
a rank. Otherwise it starts a process for each device and watches these processes. The modules:

process     rank and world size of this process, and the rendezvous of the ranks
devices     accelerator, devices, precision and threads of a run
supervisor  the parent process of local ranks: it starts, watches and restarts them
rank        the run of the training function in one rank, and the report of its end
signals     requests to stop
watchdog    heartbeats, and the detection of ranks that hang
agreement   a question to all ranks without a collective operation
streams     the form of log lines and warnings
measure     peak speed of a device
"""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from gptrain.checkpoints import fileops
from gptrain.checkpoints.lock import LOST_HOST_S, NAMED_AFTER_S, RunLock
from gptrain.checkpoints.signature import sign_record
from gptrain.core import locations
from gptrain.core.schema import RunConfig
from gptrain.runtime.process import this_process
from gptrain.runtime.signals import StopFlag, die_with_parent

__all__ = ["run"]


def run(train: Callable, cfg: RunConfig, find_checkpoint: Callable) -> dict[str, float]:
    """Run one job to its end, as the only run in its folder, and return its metrics.

    With several local devices and without a launcher, this process starts one process for each
    device, watches them, and restarts them after a failure, at most `launcher.max_restarts` times.
    Otherwise it runs `train` itself. If a launcher such as torchrun or srun has started the ranks,
    each of them calls this function.

    Args:
        train: Function (cfg, guard) -> metrics, which runs in every rank. `guard` is the rank's
            `watchdog.Guard`, to which `train` must send heartbeats.
        cfg: Configuration of the run.
        find_checkpoint: Function (cfg, lock, world_size) -> folder of the verified checkpoint to
            resume from, or None. `lock` is the RunLock of the run folder. The process that holds it
            calls the function before any rank starts, and again before a restart.

    Raises:
        JobFailedError: If the job fails or was asked to stop, after the reason has been printed. It
            has the exit code. A rank of a launcher ends its process with this code instead.
        ConfigError: If the config does not fit the content of its folder, or another run holds the
            folder: no training has begun then. Also if restarts made no progress.
        OSError: If the record of the run cannot be written into its folder.
    """
    process = this_process()
    with StopFlag() as stop:
        from gptrain.runtime.devices import find_devices  # imports torch, which takes seconds
        from gptrain.runtime.rank import remove_old_starts, run_rank, start_log
        from gptrain.runtime.supervisor import is_restart, prepare_start, supervise

        devices = find_devices(cfg)
        again = is_restart()
        if process.rank > 0:  # rank 0 locks the folder and sends the path of the checkpoint
            report_folder(cfg.run_dir)
            return run_rank(train, cfg, stop)
        # The kernel frees the lock when this process ends, however it ends.
        with RunLock(cfg.run_dir, LOST_HOST_S if again else NAMED_AFTER_S) as lock:
            start_log()
            cfg = prepare_start(cfg, find_checkpoint, lock, devices.world_size, again)
            remove_old_starts(cfg.run_dir)
            keep_config(cfg)
            report_folder(cfg.run_dir)
            # A run that was asked to stop by now ends in this process, without starting ranks.
            if process.is_rank or devices.n_local == 1 or stop:
                return run_rank(train, cfg, stop)
            start_again = partial(
                prepare_start, cfg, find_checkpoint, lock, devices.world_size, again=True
            )
            return supervise(train, cfg, devices.n_local, start_again, stop)


def report_folder(run_dir: str) -> None:
    """Report the run folder to `gptrain.fit`, if `gptrain.fit` has started this process.

    Also makes the kernel send SIGTERM to this process when the process of `gptrain.fit` ends, so
    that the run then saves and stops. Does nothing in a run that was started in another way.

    Args:
        run_dir: Run folder, which this run holds.

    Raises:
        OSError: If the file for `gptrain.fit` cannot be written.
    """
    if locations.REPORT_VARIABLE in os.environ:
        die_with_parent(os.getppid(), signal.SIGTERM)
        locations.report_to_fit(folder=str(run_dir))


def keep_config(cfg: RunConfig) -> None:
    """Write Hydra's record of a run to .hydra/ in its folder, and sign the record.

    The record has the config, Hydra's own config and the typed overrides. Hydra itself would write
    it before the folder is locked, and a start that is refused would overwrite the record of the
    run in that folder. The signature proves later that this user has started the run. Call it under
    the run lock.

    Args:
        cfg: Configuration of the run.

    Raises:
        OSError: If a file cannot be written.
    """
    # Imported late, so that `gptrain.runs` starts fast.
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    folder = Path(cfg.run_dir) / ".hydra"
    folder.mkdir(exist_ok=True)
    hydra = cast(Any, HydraConfig.instance().cfg)
    records = {"config": cfg.plain(), "hydra": hydra, "overrides": hydra.hydra.overrides.task}
    for name, record in records.items():
        fileops.replace(folder / f"{name}.yaml", OmegaConf.to_yaml(record).encode())
    sign_record(cfg.run_dir)

"""Start, watch and end the processes of a job.

`run` trains in this process if the job has one device, or if a launcher has started this process as
a rank. Otherwise it starts a process for each device, as torchrun does. The modules:

process     rank and world size of this process, and the store of the job
devices     accelerator, devices, precision and threads of a run
launch      the start of local ranks, and their restarts
rank        the run of the training function in one rank, and the report of its end
signals     requests to stop
watchdog    heartbeats, and the thread that ends a rank that hangs
"""

import ctypes
import inspect
import os
import signal
import sys
from collections.abc import Callable

from gptrain.core import locations
from gptrain.core.schema import RunConfig
from gptrain.runtime.process import this_process
from gptrain.runtime.signals import StopFlag

__all__ = ["run"]


def run(train: Callable, cfg: RunConfig, find_checkpoint: Callable) -> dict[str, float]:
    """Run one job to its end, as the only run in its folder, and return its metrics.

    With several local devices and without a launcher, this process runs the same command again once
    per device, and restarts the ranks after a failure, at most `launcher.max_restarts` times.
    Otherwise it runs `train` itself. If a launcher such as torchrun or srun has started the ranks,
    each of them calls this function.

    Args:
        train: Function (cfg, guard) -> metrics, which runs in every rank. `guard` is the rank's
            `watchdog.Guard`, to which `train` must send heartbeats. The ranks run the script that
            defines the function.
        cfg: Configuration of the run.
        find_checkpoint: Function (cfg, lock, world_size) -> folder of the verified checkpoint to
            resume from, or None. Rank 0, which holds `lock`, the RunLock of the run folder, calls
            the function before it joins the other ranks.

    Raises:
        JobFailedError: If the job fails or was asked to stop, after the reason has been printed. It
            has the exit code. A rank of a launcher ends its process with this code instead.
        ConfigError: If the config does not fit the content of its folder, or another run holds the
            folder: no training has begun then. With several local devices it is a JobFailedError,
            because a rank finds it.
        OSError: If the record of the run cannot be written into its folder.
    """
    with StopFlag() as stop:
        if locations.REPORT_VARIABLE in os.environ and not this_process().is_rank:
            end_with_parent()
        from gptrain.runtime.devices import find_devices  # imports torch, which takes seconds
        from gptrain.runtime.launch import launch
        from gptrain.runtime.rank import run_rank

        devices = find_devices(cfg)
        if this_process().is_rank or devices.n_local == 1:
            return run_rank(train, cfg, find_checkpoint, devices.world_size, stop)
        return launch(inspect.getfile(train), cfg, devices.n_local, stop)


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when the process of `gptrain.fit` ends.

    The run then saves and stops. Does nothing on other systems than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG

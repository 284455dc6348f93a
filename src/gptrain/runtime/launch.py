"""How a job of the command line runs: in this process, or in ranks that it starts."""

import ctypes
import inspect
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gptrain.checkpoints.status import RESULT_NAME, PreemptedError, read_status
from gptrain.core import errors, locations
from gptrain.core.errors import Ending, JobFailedError, ending_of
from gptrain.core.schema import RunConfig
from gptrain.core.small_files import read_facts
from gptrain.runtime.devices import find_devices
from gptrain.runtime.process import CHECKED, this_process
from gptrain.runtime.rank import report_ending, run_rank, typed_words
from gptrain.runtime.signals import StopFlag

SAVING_S = "3600"  # time for the ranks to save, from torch 2.12 on; torch 2.11 gives them 30 s
# Hydra's own words that change what a rank prints or finds. The others are those of a sweep.
KEPT_WORDS = ("hydra.searchpath", "hydra.job_logging", "hydra/job_logging", "hydra.verbose")


def run(train: Callable, cfg: RunConfig, find_checkpoint: Callable) -> dict[str, float]:
    """Run one job to its end, as the only run in its folder, and return its final metrics.

    With several local devices and without a launcher, this process runs the same command again once
    per device, restarts the ranks after a failure, at most `launcher.max_restarts` times, and takes
    the metrics from result.json: none under fast_dev_run. Otherwise it runs `train` itself. If a
    launcher such as torchrun or srun has started the ranks, each of them calls this function.

    Args:
        train: Function (cfg, guard) -> metrics, which runs in every rank. `guard` is the rank's
            `watchdog.Guard`, to which `train` must send heartbeats. The ranks run the script that
            defines the function.
        cfg: Configuration of the run.
        find_checkpoint: Function (cfg, lock) -> folder of the verified checkpoint to
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
        devices = find_devices(cfg)
        if this_process().is_rank or devices.n_local == 1:
            return run_rank(train, cfg, find_checkpoint, stop)
        return launch(inspect.getfile(train), cfg, devices.n_local, stop)


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when that of `gptrain.fit` ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


def launch(script: str, cfg: RunConfig, n_ranks: int, stop: StopFlag) -> dict[str, float]:
    """Run the command of this job once per device of this machine, and return its final metrics.

    After a failure for which a restart may help, all ranks are started again from the newest
    checkpoint, at most `launcher.max_restarts` times. A signal is sent on to the ranks, which save,
    and end. A second Ctrl-C ends this process, and the ranks notice it.

    Raises:
        JobFailedError: If the job fails, or if it was asked to stop. It has the exit code.
    """
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False  # a failed rank has printed its own error
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVING_S)
    script = min(os.path.relpath(script), script, key=len)  # it is part of printed commands
    hydra = cast(Any, HydraConfig.get())
    number = OmegaConf.select(hydra, "job.num", default=0)  # of a job of a sweep
    words = [*typed_words(KEPT_WORDS, run_dir=cfg.run_dir), f"hydra.job.num={number}"]
    for n_restarts in range(cfg.launcher.max_restarts + 1):
        os.environ[CHECKED] = str(n_restarts)
        code = start_ranks([script, *words], cfg, n_ranks, stop)
        n_left = cfg.launcher.max_restarts - n_restarts
        if code not in errors.RESTARTED or stop or not n_left:
            break
        print(f"warning: started again, {n_left - 1} more times at most", file=sys.stderr)
    if code != errors.DONE:
        raise JobFailedError(code, (read_status(cfg.run_dir) or {}).get("message") or "")
    return read_facts(Path(cfg.run_dir) / RESULT_NAME).get("metrics", {})


def start_ranks(command: list[str], cfg: RunConfig, n_ranks: int, stop: StopFlag) -> int:
    """Run a Python command once per rank until all ranks have ended, and return their exit code.

    When a rank fails, the others get SIGTERM. A rank that fails writes its code to status.json.
    This process reports a rank that was killed, and ranks that could not report anything.
    """
    # torch itself would listen on all interfaces. It finds this server, which has the same port.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    served = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n_ranks,
        run_id=str(port),
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
        local_addr="127.0.0.1",
        signals_to_handle="SIGQUIT",  # StopFlag handles the others
    )
    before = read_status(cfg.run_dir)
    rank, failed = 0, 0
    stop.error = lambda number: SignalException(f"got {number.name}", number)
    try:
        with TemporaryDirectory() as logs:  # torch would leave its own behind
            config.logs_specs = DefaultLogsSpecs(log_dir=logs)
            if not stop:
                elastic_launch(config, sys.executable)("-u", *command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        failed = errors.PREEMPTED if stop else failure.exitcode
    except SignalException as error:
        failed = errors.PREEMPTED if stop else 128 + error.sigval
    finally:
        stop.error = None
        del served, os.environ[CHECKED]
    status = read_status(cfg.run_dir)
    if failed < 0:
        reason = f"killed by signal {-failed}"
        reason += ", possibly because memory ran out" if -failed == signal.SIGKILL else ""
        line = f"error: rank {rank} (process {failure.pid}) was {reason}"
        ending = Ending(errors.FAILED, "killed", line)
    elif status and status != before and (status["exit_code"] or stop or not failed):
        return status["exit_code"]
    elif failed == errors.PREEMPTED:
        ending = ending_of(PreemptedError())
    elif failed in (1, errors.FAILED):  # 1 is Python's code of an exception, which it has printed
        ending = Ending(errors.FAILED, "error", f"error: rank {rank} ended with exit code {failed}")
    else:
        return failed  # the rank has refused the config or the folder
    report_ending(cfg, ending, rank, replace=failed < 0)
    return ending.code

"""Runs a job to its end: in this process, or in ranks that it starts; reports how it ended."""

import ctypes
import inspect
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import OmegaConf
from torch import distributed
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gptrain.checkpoints import files, status
from gptrain.checkpoints.goodput import earlier_seconds
from gptrain.checkpoints.lock import LOST_HOST_S, NAMED_AFTER_S, RunLock
from gptrain.checkpoints.signature import sign_record
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import errors, labels, locations, shell
from gptrain.core.errors import Ending, JobFailedError, ending_of
from gptrain.core.schema import RunConfig
from gptrain.core.small_files import read_facts
from gptrain.runtime.devices import find_devices
from gptrain.runtime.process import CHECKED, is_restart, this_process
from gptrain.runtime.signals import StopFlag, kill_workers
from gptrain.runtime.watchdog import Guard

SAVING_S = "3600"  # time for the ranks to save, from torch 2.12 on; torch 2.11 gives them 30 s
IMPORTING_S = 600.0  # time to import torch from a network file system that all ranks read at once
PEERS_REPORT_S = 1.0  # time in which a failed rank writes status.json
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
        is_of_fit = locations.REPORT_VARIABLE in os.environ and not this_process().is_rank
        if is_of_fit and sys.platform == "linux":
            # PR_SET_PDEATHSIG: the kernel sends SIGTERM when the process of `gptrain.fit` ends.
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        devices = find_devices(cfg)
        if this_process().is_rank or devices.n_local == 1:
            return run_rank(train, cfg, find_checkpoint, stop)
        return launch(inspect.getfile(train), cfg, devices.n_local, stop)


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
    number = OmegaConf.select(cast(Any, HydraConfig.get()), "job.num", default=0)  # of a sweep
    words = [*typed_words(KEPT_WORDS, run_dir=cfg.run_dir), f"hydra.job.num={number}"]
    for n_restarts in range(cfg.launcher.max_restarts + 1):
        os.environ[CHECKED] = str(n_restarts)
        code = start_ranks([script, *words], cfg, n_ranks, stop)
        n_left = cfg.launcher.max_restarts - n_restarts
        if code not in errors.RESTARTED or stop or not n_left:
            break
        print(f"warning: started again, {n_left - 1} more times at most", file=sys.stderr)
    if code != errors.DONE:
        raise JobFailedError(code, (status.read_status(cfg.run_dir) or {}).get("message") or "")
    return read_facts(Path(cfg.run_dir) / status.RESULT_NAME).get("metrics", {})


def start_ranks(command: list[str], cfg: RunConfig, n_ranks: int, stop: StopFlag) -> int:
    """Run a Python command once per rank until all ranks have ended, and return their exit code.

    When a rank fails, the others get SIGTERM. A rank that fails writes its code to status.json.
    This process reports a rank that was killed, and ranks that could not report anything.
    """
    # torch itself would listen on all interfaces. It finds this server, which has the same port.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    served = distributed.TCPStore(
        "127.0.0.1", port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach()
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
        signals_to_handle="SIGQUIT",  # StopFlag handles the others
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else torch would leave a folder behind
    )
    before = status.read_status(cfg.run_dir)
    rank, failed = 0, 0
    stop.error = lambda number: SignalException(f"got {number.name}", number)
    try:
        if not stop:
            elastic_launch(config, sys.executable)("-u", *command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        failed = failure.exitcode
    except SignalException as error:
        failed = 128 + error.sigval
    finally:
        stop.error = None
        del served, os.environ[CHECKED]
    failed = errors.PREEMPTED if stop else failed
    ended = status.read_status(cfg.run_dir)
    if failed < 0:
        reason = f"killed by signal {-failed}"
        reason += ", possibly because memory ran out" if -failed == signal.SIGKILL else ""
        line = f"error: rank {rank} (process {failure.pid}) was {reason}"
        ending = Ending(errors.FAILED, "killed", line)
    elif ended and ended != before and (ended["exit_code"] or stop or not failed):
        return ended["exit_code"]
    elif failed == errors.PREEMPTED:
        ending = ending_of(status.PreemptedError())
    elif failed in (1, errors.FAILED):  # 1 is Python's code of an exception, which it has printed
        ending = Ending(errors.FAILED, "error", f"error: rank {rank} ended with exit code {failed}")
    else:
        return failed  # the rank has refused the config or the folder
    report_ending(cfg, ending, rank, replace=failed < 0)
    return ending.code


# A rank, or the only process of a run


def run_rank(
    train: Callable, cfg: RunConfig, find_checkpoint: Callable, stop: StopFlag
) -> dict[str, float]:
    """Run the training function in this process under a watchdog, and report how the run ended.

    Every rank calls this function. Rank 0 holds the lock of the run folder meanwhile. The first
    rank that fails writes the failure to status.json and prints it. Rank 0 writes a success. An
    error of `train` ends a rank of a launcher with its exit code, else it is a JobFailedError.
    """
    process = this_process()
    wait_s = LOST_HOST_S if is_restart() else NAMED_AFTER_S
    # The kernel frees the lock when this process ends, however it ends.
    with RunLock(cfg.run_dir, wait_s) if process.rank == 0 else nullcontext() as lock:
        phase_s: dict[str, float] = {}
        if lock is not None:
            cfg, phase_s = prepare_start(cfg, find_checkpoint, lock)
        timeout_s = cfg.launcher.timeout_s or cfg.strategy.timeout_s
        guard = Guard(stop, process.rank, timeout_s, partial(report_ending, cfg), phase_s=phase_s)
        try:
            with guard:
                guard.leave_if_asked()
                guard.beat(phase="import", allow_s=IMPORTING_S)
                metrics = train(cfg, guard)
        except BaseException as error:  # any end of a rank must end the job, with a message
            ending = ending_of(error, f"step {guard.step} in phase {guard.phase}")
            if ending.cause == "peer":  # wait: the failed rank will report the cause
                time.sleep(PEERS_REPORT_S)
            # A launcher asks the other ranks to stop when one has failed, perhaps before it began.
            # The parent of local ranks reports a rank that was killed.
            is_known = ending.code == errors.PREEMPTED and process.rank > 0
            if not is_known and not (ending.cause == "peer" and CHECKED in os.environ):
                step = error.step if isinstance(error, status.RefusedStepError) else guard.step
                # A failed save is raised on all ranks, and names its own.
                report_ending(cfg, ending, getattr(error, "rank", process.rank), step)
            if process.is_rank:
                # After sys.exit the destructor of a process group would wait for lost ranks.
                logging.shutdown()
                sys.stdout.flush()
                os._exit(ending.code)
            raise JobFailedError(ending.code, ending.line) from error
        finally:
            kill_workers()
        if process.rank == 0:
            report_ending(cfg, Ending(errors.DONE, "done", "done"), 0, guard.step)
    if distributed.is_initialized():  # NCCL warns if a process ends with a group
        distributed.destroy_process_group()
    return metrics


def prepare_start(
    cfg: RunConfig, find_checkpoint: Callable, lock: RunLock
) -> tuple[RunConfig, dict[str, float]]:
    """Find the checkpoint, record the start of a run in its folder, and return its config.

    The path of the checkpoint, or None, is the `ckpt_path` of the returned config. A restarted
    training resumes from its newest checkpoint, whatever `ckpt_path` was typed. The second value
    is the result of `earlier_seconds`.
    """
    composed = cast(Any, HydraConfig.instance().cfg)
    # A file of the log is opened under the lock.
    configure_log(composed.hydra.job_logging, composed.hydra.verbose)
    if is_restart() and cfg.task == "fit" and resume_facts(cfg)["checkpoint"]:
        cfg = cfg.changed({"ckpt_path": "last"})
    checkpoint = find_checkpoint(cfg, lock)
    cfg = cfg.changed({"ckpt_path": None if checkpoint is None else str(checkpoint)})
    phase_s = earlier_seconds(cfg.run_dir, lock.run_id, checkpoint) if checkpoint else {}
    (Path(cfg.run_dir) / status.STATUS_NAME).unlink(missing_ok=True)  # of an earlier start
    # Hydra would write its record before the folder is locked, over the record of another run.
    folder = Path(cfg.run_dir) / ".hydra"
    folder.mkdir(exist_ok=True)
    overrides = composed.hydra.overrides.task
    records = {"config": cfg.plain(), "hydra": composed, "overrides": overrides}
    for name, record in records.items():
        files.replace(folder / f"{name}.yaml", OmegaConf.to_yaml(record).encode())
    sign_record(cfg.run_dir)
    locations.report_to_fit(folder=str(cfg.run_dir))
    return cfg, phase_s


def report_ending(
    cfg: RunConfig, ending: Ending, rank: int, step: int | None = None, replace: bool = False
) -> None:
    """Write to status.json how the run ended, and print it, if it is the first report of the run.

    `replace`, and a failure after a run that is done, replace an earlier report.
    """
    facts: dict[str, object] = {"cause": ending.cause, "exit_code": ending.code, "step": step}
    facts |= {"message": ending.line, "traceback": ending.trace or None, "rank": rank}
    try:
        facts |= resume_facts(cfg)
        is_first = status.write_status(cfg.run_dir, replace=replace, **facts)
    except OSError as error:  # the disk that failed the run may refuse status.json, too
        print(f"warning: status.json cannot be written: {error}", file=sys.stderr)
        is_first = True  # the file may exist, empty: then no other rank prints
    if ending.code == errors.DONE or not (is_first or cfg.debug):
        return
    if ending.code == errors.PREEMPTED:
        with suppress(OSError):  # the terminal may be gone; status.json has both
            print(labels.line("stopped", ending.line))
            print(labels.line("next", facts.get("resume")), flush=True)
    else:
        print(ending.trace + ending.line, file=sys.stderr, flush=True)


def resume_facts(cfg: RunConfig) -> dict[str, object]:
    """Return the entries of status.json that say how to resume the run, or to repeat it.

    `checkpoint` is the folder of the newest one, which is not verified, or None. The command
    `resume` has no `from_run`, because by now its overrides are among those of this run.
    """
    checkpoint = CheckpointStore(Path(cfg.run_dir) / status.CHECKPOINTS_NAME).newest()
    ckpt_path = "last" if cfg.task == "fit" and checkpoint else cfg.ckpt_path
    values = {"run_dir": cfg.run_dir, "ckpt_path": ckpt_path, "from_run": None}
    resume = shell.train_command(*typed_words(("hydra.searchpath=",), **values))
    return {"checkpoint": checkpoint, "resume": resume}


def typed_words(kept: tuple[str, ...] = (), **values: object) -> list[str]:
    """Return the typed overrides of this run, in which some keys have other values.

    `kept` are the beginnings of the words for Hydra itself that are kept. None leaves a key out.
    References such as `${seed}` are not resolved. [] if Hydra has composed no config.
    """
    cfg = cast(Any, HydraConfig.instance().cfg)
    typed: Any = OmegaConf.to_container(cfg.hydra.overrides) if cfg else {"hydra": [], "task": []}
    words = [word for word in typed["hydra"] if word.startswith(kept)]
    words += [word for word in typed["task"] if word.lstrip("+").partition("=")[0] not in values]
    return words + [shell.override(key, v) for key, v in values.items() if v is not None]

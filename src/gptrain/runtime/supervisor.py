"""Supervisor: the parent process of a run on several local devices, which starts and watches ranks.

When a rank is lost, all ranks are restarted from the newest intact checkpoint, at most
launcher.max_restarts times, and only while restarts make progress. The run folder holds the record
of the starts, which counts the restarts by torchrun and SLURM, too.
"""

import json
import logging
import multiprocessing
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from gptrain.checkpoints import fileops
from gptrain.checkpoints.lock import RunLock
from gptrain.checkpoints.manifest import read_manifest
from gptrain.checkpoints.status import RESULT_NAME, clear_status, read_status
from gptrain.checkpoints.timeline import add_start
from gptrain.core.errors import (
    DONE,
    FAILED,
    HUNG,
    PREEMPTED,
    ConfigError,
    Ending,
    JobFailedError,
    exit_code,
)
from gptrain.core.schema import RunConfig
from gptrain.core.small_files import UnreadableFileError, read_facts, read_json
from gptrain.runtime.process import ATTEMPTS_NAME, RESTART_COUNTS, read_number
from gptrain.runtime.rank import newest_checkpoint, rank_process, report_ending
from gptrain.runtime.signals import StopFlag, block_stop_signals
from gptrain.runtime.watchdog import (
    STACKS_SIGNAL,
    StallWatch,
    furthest_behind,
    hang_message,
    read_progress,
)

log = logging.getLogger(__name__)
START_METHOD = "spawn"  # fork is not safe in a process with threads and a GPU
POLL_S = 0.2  # interval between two readings of the heartbeats
GRACE_S = 6.0  # time for the other ranks to end by themselves after one has failed
PRINT_STACKS_S = 3.0  # time for live ranks to print their stacks after one hangs
RANKS_FIRST_S = 3.0  # extra time: a rank that detects its own hang prints its stacks
SAVING = ("save", "mirror")  # phases in which a rank writes a checkpoint
RESTARTS_NAME = ".restarts"
FRUITLESS_STARTS = 3  # number of restarts without a newer checkpoint after which the job fails
StartAgain = Callable[[], RunConfig]


def supervise(
    train: Callable, cfg: RunConfig, n_ranks: int, start_again: StartAgain, stop: StopFlag
) -> dict[str, float]:
    """Run one job in one process per device of this machine, and return its metrics.

    Each rank gets the environment variables that torchrun would give it. The ranks find each other
    through a file instead of a port. After a failure for which a restart may help, all ranks are
    started again, at most `launcher.max_restarts` times.

    Args:
        train: Function (cfg, guard) -> metrics, defined at the top level of a file.
        cfg: Configuration of the run.
        n_ranks: Number of ranks.
        start_again: Function that prepares a restart and returns its config, with the checkpoint to
            resume from.
        stop: Flag that is true once the run was asked to stop.

    Returns:
        The metrics in result.json. Empty if rank 0 has written no such file.

    Raises:
        JobFailedError: If the job fails, or if it was asked to stop. It has the exit code.
        ConfigError: If a restart is impossible, for example because restarts made no progress.
    """
    left = cfg.launcher.max_restarts
    code = run_once(train, cfg, n_ranks, stop)
    while exit_code(code).is_restarted and left and not stop:
        cfg = start_again()
        left -= 1
        log.warning("warning: started again, %d more times at most", left)
        code = run_once(train, cfg, n_ranks, stop)
    if code != DONE:
        raise JobFailedError(code, (read_status(cfg.run_dir) or {}).get("message") or "")
    return read_facts(Path(cfg.run_dir) / RESULT_NAME).get("metrics", {})


def prepare_start(
    cfg: RunConfig, find: Callable, lock: RunLock, world_size: int, again: bool
) -> RunConfig:
    """Find the checkpoint to resume from and record the start, before any rank starts.

    A training is recorded in `.restarts` and, except under fast_dev_run, in timeline.jsonl. The
    status.json of an earlier start is removed. Call it under the run lock.

    Args:
        cfg: Configuration of the run.
        find: Function (cfg, lock, world_size) -> folder of a verified checkpoint, or None.
        lock: Lock of the run folder.
        world_size: Number of ranks of the job.
        again: Whether a launcher or the supervisor restarts the run. A training then resumes from
            its newest checkpoint, if it has one, whatever `ckpt_path` was typed.

    Returns:
        The config with the folder of the checkpoint in `ckpt_path`, or None if nothing is loaded.

    Raises:
        ConfigError: If the config does not fit the folder, or three restarts in a row made no
            progress (exit code 70).
        OSError: If the run folder cannot be read or written.
    """
    if again and cfg.task == "fit" and newest_checkpoint(cfg.run_dir):
        cfg = cfg.changed({"ckpt_path": "last"})
    checkpoint = find(cfg, lock, world_size)
    cfg = cfg.changed({"ckpt_path": None if checkpoint is None else str(checkpoint)})
    step = read_manifest(checkpoint)["step"] if checkpoint else 0
    if cfg.task == "fit" and record_start(cfg.run_dir, step, again) >= FRUITLESS_STARTS:
        message = f"{FRUITLESS_STARTS} starts in a row made no progress"
        raise ConfigError.of("", None, message, code=FAILED)
    if cfg.task == "fit" and not cfg.trainer.fast_dev_run:
        add_start(cfg.run_dir, step)
    clear_status(cfg.run_dir)
    return cfg


def is_restart() -> bool:
    """Return whether torchrun or SLURM has restarted this job, by their environment variables.

    Raises:
        ConfigError: If one of these variables is not a whole number.
    """
    return any(read_number(name) for name in RESTART_COUNTS)


def record_start(run_dir: str | Path, step: int, again: bool) -> int:
    """Record a start in the file `.restarts`, and return how many restarts made no progress.

    These are the restarts in a row, up to this one, that began from the same checkpoint as the
    start before or from an older one. A damaged file counts as missing.

    Args:
        run_dir: Folder of the run.
        step: Step of the checkpoint from which the run starts.
        again: Whether a launcher or the supervisor restarts the run. A start by a person sets the
            count back to 0.

    Raises:
        OSError: If the file cannot be read or written.
    """
    path = Path(run_dir) / RESTARTS_NAME
    last = (read_status(run_dir) or {}).get("cause")
    starts = [{"step": step, "time": time.strftime("%F %T"), "after": last}]
    fruitless = 0
    # The file is missing at the first start. A damaged file counts as missing.
    with suppress(FileNotFoundError, UnreadableFileError, LookupError, TypeError):
        before = read_json(path)
        if again:
            fruitless = 0 if step > before["step"] else before["fruitless"] + 1
        starts = [*before["starts"], *starts]
    record = {"step": step, "fruitless": fruitless, "starts": starts}
    fileops.replace(path, json.dumps(record).encode())
    return fruitless


def run_once(train: Callable, cfg: RunConfig, n_ranks: int, stop: StopFlag) -> int:
    """Start all ranks once, wait until they have ended, and return the job's exit code.

    No rank is left when it returns or raises an exception: ranks that still live are killed.

    Args:
        train: Function (cfg, guard) -> metrics, defined at the top level of a file.
        cfg: Configuration of the run.
        n_ranks: Number of ranks.
        stop: Flag that is true once the run was asked to stop.
    """
    context = multiprocessing.get_context(START_METHOD)
    function: Any = train
    job = (function.__code__.co_filename, function.__name__, cfg, picklable_hydra())
    ranks: list[BaseProcess] = []
    attempt = uuid.uuid4().hex
    folder = Path(cfg.run_dir) / ATTEMPTS_NAME / attempt
    environment = {
        "GPTRAIN_SUPERVISED": "1",
        "TORCHELASTIC_RUN_ID": attempt,
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "GROUP_RANK": "0",
    }
    try:
        for rank in range(n_ranks):
            place = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=rank_process, args=(*job, place, os.getpid()))
            with block_stop_signals():  # a signal waits until the rank has installed its handlers
                process.start()
            ranks.append(process)
        watch(cfg, ranks, stop, folder)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        shutil.rmtree(folder, ignore_errors=True)
    return job_code(cfg, ranks)


def picklable_hydra() -> dict[str, Any]:
    """Return Hydra's own config as nested dicts, which can be sent to the process of a rank.

    Classes of plugins, which cannot be pickled, become plain values. Interpolations in the log's
    config and in the overrides are resolved here, where all keys and resolvers are known.
    """
    node: Any = HydraConfig.get()
    plain = cast(dict, OmegaConf.to_container(node))
    for key in ("job_logging", "overrides"):
        plain[key] = OmegaConf.to_container(node[key], resolve=True)
    return {"hydra": plain}


def watch(cfg: RunConfig, ranks: list[BaseProcess], stop: StopFlag, beats: Path) -> None:
    """Wait until all ranks have ended, or for a limited time after one has failed or hangs.

    Forwards a request to stop to the ranks by SIGTERM, and reports a killed rank or a hang. After a
    rank has failed the others have a few seconds (GRACE_S) to end by themselves, and after a
    request to stop the time that a save needs. After a hang the silent ranks have a few seconds
    (PRINT_STACKS_S) to print their stacks. Ranks that live longer are left to the caller, which
    kills them.

    Args:
        cfg: Configuration of the run.
        ranks: Processes of the ranks, in rank order.
        stop: Flag that is true once the run was asked to stop.
        beats: Folder of the ranks' heartbeats.
    """
    timeout_s = cfg.launcher.timeout_s or cfg.strategy.timeout_s
    stalls = StallWatch(partial(read_progress, beats), timeout_s + RANKS_FIRST_S)
    forwarded = False
    deadline_s = code = None
    alive = True
    # After the last rank has ended, the loop runs once more to report how it ended.
    while alive:
        alive = [rank.sentinel for rank in ranks if rank.is_alive()]
        if alive:
            wait(alive, POLL_S)
        if stop and not forwarded:
            forwarded = True
            for rank in ranks:
                rank.terminate()  # SIGTERM asks a rank to stop
        if deadline_s is not None:
            # A rank that was asked to stop may still save, and copy the checkpoint to the mirror.
            is_saving = any(progress.phase in SAVING for progress in read_progress(beats))
            if time.monotonic() > deadline_s and not (code == PREEMPTED and is_saving):
                return
            continue
        failed = next((index for index, rank in enumerate(ranks) if rank.exitcode), None)
        if failed is not None:
            deadline_s = time.monotonic() + GRACE_S
            code = ranks[failed].exitcode or FAILED
            if code == PREEMPTED:
                stop.set("a rank")  # only this rank got the signal, before training began
            elif code < 0:
                reason = f"killed by signal {-code}"
                reason += ", possibly because memory ran out" if code == -9 else ""
                line = f"error: rank {failed} (process {ranks[failed].pid}) was {reason}"
                report_ending(cfg, Ending(FAILED, "killed", line), failed, replace=True)
            elif read_status(cfg.run_dir) is None:  # Python has printed the reason
                line = f"error: rank {failed} ended with exit code {code} before it could start"
                report_ending(cfg, Ending(FAILED, "error", line), failed)
        elif alive and (silent := stalls.silent_ranks()):
            deadline_s = time.monotonic() + PRINT_STACKS_S
            last = furthest_behind(silent)
            line = f"error: {hang_message(silent, stalls.limit_s(last))}"
            report_ending(cfg, Ending(HUNG, "hang", line), last.rank, last.step, replace=True)
            for progress in silent:  # a rank that still lives could not print its stacks itself
                rank = ranks[progress.rank]
                if rank.is_alive():
                    os.kill(cast(int, rank.pid), STACKS_SIGNAL)


def job_code(cfg: RunConfig, ranks: list[BaseProcess]) -> int:
    """Return the exit code of a job whose ranks have all ended: 0 if all ranks ended with 0.

    Otherwise it is the code in status.json, which the first failed rank has written, or the
    supervisor if a rank was killed or hung. Without the status of a failure it is the first code
    above 1 in rank order (1 is Python's own, a negative code is a signal), or else FAILED (70).

    Args:
        cfg: Configuration of the run.
        ranks: Processes of the ranks, in rank order.
    """
    codes = [code for rank in ranks if (code := rank.exitcode)]
    if not codes:
        return DONE
    reported: Any = (read_status(cfg.run_dir) or {}).get("exit_code")
    # 1 is Python's code of an exception.
    return reported or next((code for code in codes if code > 1), FAILED)

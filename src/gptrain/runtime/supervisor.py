"""The parent of a run on several local devices: it starts the ranks, watches and ends them.

When a rank is lost, all ranks are restarted from the newest good checkpoint, at most
launcher.max_restarts times, and only while restarts make progress. The run folder has the record of
the starts, so that it covers the restarts of torchrun and SLURM, too.
"""

from __future__ import annotations

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
from omegaconf import DictConfig, OmegaConf

from gptrain.checkpoints import fileops
from gptrain.checkpoints.lock import RunLock
from gptrain.checkpoints.manifest import read_manifest
from gptrain.checkpoints.status import RESULT_NAME, clear_status, read_status
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
from gptrain.runtime.process import ATTEMPTS_NAME, RESTART_COUNTS
from gptrain.runtime.rank import newest_checkpoint, rank_process, report_ending
from gptrain.runtime.signals import StopFlag, block_stop_signals
from gptrain.runtime.watchdog import (
    StallWatch,
    furthest_behind,
    hang_message,
    read_progress,
)

log = logging.getLogger(__name__)
START_METHOD = "spawn"  # forked children of a process with threads and a GPU are not safe
POLL_S = 0.2  # heartbeats are read so often, maybe over a network
GRACE_S = 6.0  # for the others to leave by themselves once one has failed
PRINT_STACKS_S = 3.0  # for live ranks to print their stacks once one is hung
RANKS_FIRST_S = 3.0  # a rank that sees its own hang prints more than the supervisor can
SAVING = ("save", "mirror")  # phases of a heartbeat
RESTARTS_NAME = ".restarts"
FRUITLESS_STARTS = 3  # without a newer checkpoint: the fault is not chance, a restart cannot help
StartAgain = Callable[[], RunConfig]


def supervise(
    train: Callable, cfg: RunConfig, n_ranks: int, start_again: StartAgain, stop: StopFlag
) -> dict[str, float]:
    """Run one job in one process per device of this machine, and return its metrics.

    Each rank gets the environment that torchrun would give it. The ranks synchronize through a
    file instead of a port.

    Args:
        start_again: Function that prepares a restart and returns its config.

    Raises:
        JobFailedError: If the job fails. It has the exit code.
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
    """Return the config with the checkpoint to resume from in ckpt_path, or None for step 0.

    Args:
        again: a launcher's own start, which takes the newest checkpoint, whatever was typed.

    Raises: ConfigError, with the folder as it was; with code 70 where starts get nowhere.
    """
    if again and cfg.task == "fit" and newest_checkpoint(cfg.run_dir):
        cfg = cfg.changed({"ckpt_path": "last"})
    checkpoint = find(cfg, lock, world_size)
    cfg = cfg.changed({"ckpt_path": None if checkpoint is None else str(checkpoint)})
    step = read_manifest(checkpoint)["step"] if checkpoint else 0
    if cfg.task == "fit" and note_start(cfg.run_dir, step, again) >= FRUITLESS_STARTS:
        message = f"{FRUITLESS_STARTS} starts in a row got no further"
        raise ConfigError.of("", None, message, code=FAILED)
    clear_status(cfg.run_dir)
    return cfg


def is_restart() -> bool:
    """Return whether torchrun or SLURM has restarted this job."""
    return any(int(os.environ.get(name) or 0) > 0 for name in RESTART_COUNTS)


def note_start(run_dir: str | Path, step: int, again: bool) -> int:
    """Record a start and return how many starts in a row got no further than the start before.

    Args:
        step: Step of the checkpoint from which the run starts.
        again: Whether a launcher restarts the run. A start by a person counts from zero.
    """
    path = Path(run_dir) / RESTARTS_NAME
    last = (read_status(run_dir) or {}).get("cause")
    starts = [{"step": step, "time": time.strftime("%F %T"), "after": last}]
    fruitless = 0
    with suppress(
        FileNotFoundError, UnreadableFileError, LookupError, TypeError
    ):  # the first, or odd
        before = read_json(path)
        if again:
            fruitless = 0 if step > before["step"] else before["fruitless"] + 1
        starts = [*before["starts"], *starts]
    record = {"step": step, "fruitless": fruitless, "starts": starts}
    fileops.replace(path, json.dumps(record).encode())
    return fruitless


def run_once(train: Callable, cfg: RunConfig, n_ranks: int, stop: StopFlag) -> int:
    """Start all ranks once, wait until they have ended, and return the job's exit code."""
    context = multiprocessing.get_context(START_METHOD)
    function: Any = train
    job = (function.__code__.co_filename, function.__name__, cfg, plain_hydra())
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
            with block_stop_signals():  # a signal waits until the rank can take it as a request
                process.start()
            ranks.append(process)
        watch(cfg, ranks, stop, folder)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        shutil.rmtree(folder, ignore_errors=True)
    return job_code(cfg, ranks)


def plain_hydra() -> DictConfig:
    """Return Hydra's node for a rank, without classes of plugins, which cannot be pickled.

    References in the log's config and in the overrides are resolved here, where all keys and
    resolvers are known.
    """
    node: Any = HydraConfig.get()
    plain = cast(dict, OmegaConf.to_container(node))
    for key in ("job_logging", "overrides"):
        plain[key] = OmegaConf.to_container(node[key], resolve=True)
    return OmegaConf.create({"hydra": plain})


def watch(cfg: RunConfig, ranks: list[BaseProcess], stop: StopFlag, beats: Path) -> None:
    """Watch the ranks until all have ended, or until those left have had their time.

    Args:
        beats: Folder of the ranks' heartbeats.
    """
    timeout_s = cfg.launcher.timeout_s or cfg.strategy.timeout_s
    stalls = StallWatch(partial(read_progress, beats), timeout_s + RANKS_FIRST_S)
    forwarded = False
    deadline_s = code = None
    alive = True
    while alive:  # and once more after that: how the last ones ended
        if alive := [rank.sentinel for rank in ranks if rank.is_alive()]:
            wait(alive, POLL_S)
        if stop and not forwarded:
            forwarded = True
            for rank in ranks:
                rank.terminate()  # SIGTERM: to a rank it is the same request
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
                stop.set("a rank")  # asked alone, and left before the ranks could talk
            elif code < 0:
                why = f"killed by signal {-code}"
                why += ", maybe for want of memory" if code == -9 else ""
                line = f"error: rank {failed} (process {ranks[failed].pid}) was {why}"
                report_ending(cfg, Ending(FAILED, "killed", line), failed, replace=True)
            elif read_status(cfg.run_dir) is None:  # before it could, so Python has said why
                line = f"error: rank {failed} ended with code {code} before it could begin"
                report_ending(cfg, Ending(FAILED, "error", line), failed)
        elif alive and (silent := stalls.silent_ranks()):
            deadline_s = time.monotonic() + PRINT_STACKS_S
            last = furthest_behind(silent)
            line = f"error: {hang_message(silent, stalls.limit_s(last))}"
            report_ending(cfg, Ending(HUNG, "hang", line), last.rank, last.step, replace=True)


def job_code(cfg: RunConfig, ranks: list[BaseProcess]) -> int:
    """Return the exit code of a job whose ranks have all ended: that of the first that failed."""
    codes = [code for rank in ranks if (code := rank.exitcode)]
    if not codes:
        return DONE
    reported: Any = (read_status(cfg.run_dir) or {}).get("exit_code")
    return reported or next((code for code in codes if code > 1), FAILED)  # 1 is Python's own

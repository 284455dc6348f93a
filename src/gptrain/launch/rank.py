"""What surrounds the training function in every rank: log, guard, and an ending for each error."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import DictConfig

from gptrain import problems
from gptrain.config import register_resolvers as register
from gptrain.launch.ending import (
    Ending,
    classify,
    newest_checkpoint,
    resume_command,
    spare_memory,
)
from gptrain.launch.process import this_process
from gptrain.launch.start import BEATS_NAME
from gptrain.resilience.guard import Guard
from gptrain.resilience.signals import StopFlag
from gptrain.resilience.status import write_status
from gptrain.resilience.watchdog import die_with_parent

log = logging.getLogger(__name__)
BEATS_VARIABLE = "GPTRAIN_BEATS"  # folder of the ranks' signs of life
IMPORTING_S = 600.0  # torch from a network file system that all ranks read at once
PEERS_WORD_S = 1.0  # a rank that failed has written its status before its connections close


def run_rank(
    train: Callable, cfg: DictConfig, parent_pid: int | None = None, stop: StopFlag | None = None
) -> dict[str, float]:
    """Runs `train` in this process, guarded; the first rank that fails tells how and why.

    Args:
        parent_pid: the supervisor that must live.   stop: the flag of this process, if it has one.

    Raises:
        JobFailed: with the exit code.
    """
    rank = this_process().rank
    guard = Guard(
        cfg.run_dir,
        os.environ.get(BEATS_VARIABLE, Path(cfg.run_dir) / BEATS_NAME),
        rank=rank,
        timeout_s=cfg.launcher.timeout_s or cfg.strategy.timeout_s,
        parent_pid=parent_pid,
        about=lambda: {
            "checkpoint": newest_checkpoint(cfg.run_dir),
            "resume": resume_command(cfg),
        },
        stop=stop,
    )
    try:
        with guard:
            guard.leave_if_asked()
            guard.heartbeat.beat(phase="import", allow_s=IMPORTING_S)
            metrics = train(cfg, guard)
    except BaseException as error:  # whatever ends a rank must end the job, with a word about it
        ending = classify(error, guard.doing)
        if ending.cause == "memory":
            ending = replace(ending, line=f"{ending.line}; {spare_memory(cfg)}")
        if ending.cause == "peer":  # it, or the supervisor, says more than its absence does
            time.sleep(PEERS_WORD_S)
        if tell(cfg, rank, guard.heartbeat.step, ending) or cfg.debug:
            show(cfg, ending)
        raise problems.JobFailed(ending.code, ending.line) from error
    if rank == 0:
        tell(cfg, rank, guard.heartbeat.step, Ending(problems.DONE, "done", "done"))
    return metrics


def tell(cfg: DictConfig, rank: int, step: int, ending: Ending) -> bool:
    """Writes status.json; False where another rank was first."""
    try:
        return write_status(
            cfg.run_dir,
            cause=ending.cause,
            exit_code=ending.code,
            rank=rank if ending.rank is None else ending.rank,
            step=step,
            checkpoint=newest_checkpoint(cfg.run_dir),
            resume=None if ending.code == problems.DONE else resume_command(cfg),
            message=ending.line,
            traceback=ending.trace or None,
        )
    except OSError as error:  # the disk that failed the run may refuse its obituary, too
        print(f"warning: no status.json: {error}", file=sys.stderr)
        return rank == 0


def show(cfg: DictConfig, ending: Ending) -> None:
    """Prints the ending; on stderr, but for a run that was asked to stop and did."""
    if ending.trace:
        print(ending.trace, file=sys.stderr)
    if ending.code == problems.PREEMPTED:
        for label, words in (("stopped", ending.line), ("next", resume_command(cfg))):
            if log.isEnabledFor(logging.INFO):
                log.info("%-9s %s", label, words)
            else:  # another rank than 0, whose log is off, was the first to end
                print(f"{label:9} {words}", flush=True)
    else:
        print(ending.line, file=sys.stderr, flush=True)


def rank_process(
    train: Callable,
    cfg: DictConfig,
    hydra_cfg: DictConfig,
    environment: dict[str, str],
    parent_pid: int,
) -> None:
    """Entry of a spawned rank; never returns."""
    die_with_parent(parent_pid)
    os.environ.update(environment)
    register()
    HydraConfig.instance().cfg = hydra_cfg
    if this_process().rank == 0:
        configure_log(hydra_cfg.hydra.job_logging, hydra_cfg.hydra.verbose)
    else:
        logging.getLogger().setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
    code = problems.DONE
    try:
        run_rank(train, cfg, parent_pid)
    except problems.JobFailed as failure:
        code = failure.code
    leave(code)


def leave(code: int) -> NoReturn:
    """Ends a rank, but not by sys.exit: destructors of a process group wait for lost ranks."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""How a rank runs the training function, and how the end of a run is reported."""

import logging.handlers
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import distributed

from gptrain.checkpoints import files
from gptrain.checkpoints.lock import LOST_HOST_S, NAMED_AFTER_S, RunLock
from gptrain.checkpoints.manifest import read_manifest
from gptrain.checkpoints.signature import sign_record
from gptrain.checkpoints.status import (
    CHECKPOINTS_NAME,
    RefusedStepError,
    clear_status,
    write_status,
)
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.timeline import add_start
from gptrain.core import errors, labels, locations, shell
from gptrain.core.errors import Ending, JobFailedError, ending_of
from gptrain.core.schema import RunConfig
from gptrain.runtime.process import CHECKED, is_restart, this_process
from gptrain.runtime.signals import StopFlag, kill_workers
from gptrain.runtime.watchdog import Guard

log = logging.getLogger(__name__)
IMPORTING_S = 600.0  # time to import torch from a network file system that all ranks read at once
PEERS_REPORT_S = 1.0  # time in which a failed rank writes status.json


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
        if lock is not None:
            cfg = prepare_start(cfg, find_checkpoint, lock)
        timeout_s = cfg.launcher.timeout_s or cfg.strategy.timeout_s
        guard = Guard(stop, process.rank, timeout_s, partial(report_ending, cfg))
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
                step = error.step if isinstance(error, RefusedStepError) else guard.step
                report_ending(cfg, ending, process.rank, step)
            if process.is_rank:
                exit_rank(ending.code)
            raise JobFailedError(ending.code, ending.line) from error
        finally:
            kill_workers()
        if process.rank == 0:
            report_ending(cfg, Ending(errors.DONE, "done", "done"), 0, guard.step)
    if distributed.is_initialized():  # NCCL warns if a process ends with a group
        distributed.destroy_process_group()
    return metrics


def prepare_start(cfg: RunConfig, find_checkpoint: Callable, lock: RunLock) -> RunConfig:
    """Find the checkpoint and record the start of a run in its folder, and return the config.

    The path of the checkpoint, or None, is the `ckpt_path` of the returned config. A restarted
    training resumes from its newest checkpoint, whatever `ckpt_path` was typed.
    """
    start_log()
    if is_restart() and cfg.task == "fit" and newest_checkpoint(cfg.run_dir):
        cfg = cfg.changed({"ckpt_path": "last"})
    checkpoint = find_checkpoint(cfg, lock)
    cfg = cfg.changed({"ckpt_path": None if checkpoint is None else str(checkpoint)})
    if cfg.task == "fit" and not cfg.trainer.fast_dev_run:
        add_start(cfg.run_dir, read_manifest(checkpoint)["step"] if checkpoint else 0)
    clear_status(cfg.run_dir)
    keep_config(cfg)
    locations.report_to_fit(folder=str(cfg.run_dir))
    return cfg


def keep_config(cfg: RunConfig) -> None:
    """Write Hydra's record of a run to .hydra/ in its folder, and sign it.

    Hydra would write it before the folder is locked, over the record of another run.
    """
    folder = Path(cfg.run_dir) / ".hydra"
    folder.mkdir(exist_ok=True)
    hydra = cast(Any, HydraConfig.instance().cfg)
    records = {"config": cfg.plain(), "hydra": hydra, "overrides": hydra.hydra.overrides.task}
    for name, record in records.items():
        files.replace(folder / f"{name}.yaml", OmegaConf.to_yaml(record).encode())
    sign_record(cfg.run_dir)


def start_log() -> None:
    """Write the buffered log records to the log file, and from now on each record at once.

    The first record creates the file: only the holder of the run lock may call this function.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.capacity = 0  # write each later record at once
            handler.flush()


def exit_rank(code: int) -> NoReturn:
    """End this process at once, after the logs and streams are flushed.

    After sys.exit the destructor of a process group would wait for lost ranks.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_ending(
    cfg: RunConfig, ending: Ending, rank: int, step: int | None = None, replace: bool = False
) -> None:
    """Write to status.json how the run ended, and print it, if it is the first report of the run.

    `replace`, and a failure after a run that is done, replace an earlier report.
    """
    facts: dict[str, object] = {"cause": ending.cause, "exit_code": ending.code, "step": step}
    facts |= {"message": ending.line, "traceback": ending.trace or None}
    facts["rank"] = rank if ending.rank is None else ending.rank
    try:
        facts |= resume_facts(cfg)
        is_first = write_status(cfg.run_dir, replace=replace, **facts)
    except OSError as error:  # the disk that failed the run may refuse status.json, too
        print(f"warning: status.json cannot be written: {error}", file=sys.stderr)
        is_first = replace or rank == 0
    if ending.code == errors.DONE or not (is_first or cfg.debug):
        return
    if ending.code == errors.PREEMPTED:
        log.info(labels.line("stopped", ending.line))
        log.info(labels.line("next", facts.get("resume")))
    else:
        print(ending.trace + ending.line, file=sys.stderr, flush=True)


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """Return the folder of a run's newest checkpoint, which is not verified, or None."""
    return CheckpointStore(Path(run_dir) / CHECKPOINTS_NAME).newest()


def resume_facts(cfg: RunConfig) -> dict[str, object]:
    """Return the entries of status.json that say how to resume the run, or to repeat it.

    `from_run` is left out, because by now its overrides are among those of this run.
    """
    checkpoint = newest_checkpoint(cfg.run_dir)
    ckpt_path = "last" if cfg.task == "fit" and checkpoint else cfg.ckpt_path
    values = {"run_dir": cfg.run_dir, "ckpt_path": ckpt_path, "from_run": None}
    resume = shell.train_command(*typed_words(("hydra.searchpath=",), **values))
    return {"checkpoint": checkpoint, "resume": resume}


def typed_words(kept: tuple[str, ...], **values: object) -> list[str]:
    """Return the typed overrides of this run, in which some keys have other values.

    `kept` are the beginnings of the words for Hydra itself that are kept. None leaves a key out.
    """
    typed, changed = HydraConfig.get().overrides, tuple(f"{key}=" for key in values)
    words = [word for word in typed.hydra if word.startswith(kept)]
    words += [word for word in typed.task if not word.lstrip("+").startswith(changed)]
    return words + [shell.override(key, v) for key, v in values.items() if v is not None]

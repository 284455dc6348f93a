"""How one rank runs the training function, and how the end of a run is reported."""

import logging.handlers
import os
import runpy
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import OmegaConf

from gptrain.checkpoints.fileops import remove_tree
from gptrain.checkpoints.status import CHECKPOINTS_NAME, write_status
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import errors, labels, shell
from gptrain.core.errors import Ending, JobFailedError, ending_of
from gptrain.core.schema import RunConfig
from gptrain.runtime.process import attempt_folder, set_rendezvous, this_process
from gptrain.runtime.signals import StopFlag, die_with_parent
from gptrain.runtime.streams import prepare_streams
from gptrain.runtime.watchdog import Guard

log = logging.getLogger(__name__)
IMPORTING_S = 600.0  # time to import torch from a network file system that all ranks read at once
PEERS_REPORT_S = 1.0  # time in which a failed rank writes status.json


def run_rank(
    train: Callable, cfg: RunConfig, stop: StopFlag, parent_pid: int | None = None
) -> dict[str, float]:
    """Run the training function in this process under a watchdog, and report how the run ended.

    Every rank calls this function. The first rank that fails writes the failure to status.json and
    prints it. Rank 0 writes a success.

    Args:
        train: Function (cfg, guard) -> metrics.
        cfg: Configuration of the run.
        stop: Flag that is true once the run was asked to stop.
        parent_pid: Process number of the supervisor. This rank ends when the supervisor is gone.
            None without a supervisor.

    Returns:
        The metrics of the run.

    Raises:
        JobFailedError: If the rank fails. It has the exit code. A process that a launcher started
            ends with this code instead.
    """
    rank = this_process().rank
    guard = None
    try:
        guard = Guard(
            cfg.run_dir,
            attempt_folder(cfg.run_dir),
            stop,
            rank=rank,
            timeout_s=cfg.launcher.timeout_s or cfg.strategy.timeout_s,
            parent_pid=parent_pid,
            describe=partial(resume_facts, cfg),
        )
        with guard:
            guard.leave_if_asked()
            guard.heartbeat.beat(phase="import", allow_s=IMPORTING_S)
            set_rendezvous(cfg.run_dir)
            metrics = train(cfg, guard)
    except BaseException as error:  # any end of a rank must end the job, with a message
        ending = ending_of(error, guard.doing if guard else "")
        if ending.cause == "memory":
            ending = replace(ending, line=f"{ending.line}; {ways_to_save_memory(cfg)}")
        if ending.cause == "peer":  # wait: the failed rank or the supervisor will report the cause
            time.sleep(PEERS_REPORT_S)
        report_ending(cfg, ending, rank, guard.heartbeat.step if guard else None)
        if this_process().is_rank:
            exit_rank(ending.code)
        raise JobFailedError(ending.code, ending.line) from error
    if rank == 0:
        record_ending(cfg, Ending(errors.DONE, "done", "done"), rank, guard.heartbeat.step)
    return metrics


def rank_process(
    script: str, name: str, cfg: RunConfig, hydra: dict, environment: dict, parent_pid: int
) -> NoReturn:
    """Run one rank in a process that the supervisor has started, and end the process.

    The process ends with the exit code of the rank. Rank 0 writes the log of the run. The other
    ranks log errors only, and hide the warnings of Python.

    Args:
        script: File that defines the training function. It is run to get the function, because in a
            job of submitit `__main__` is another file.
        name: Name of the training function.
        cfg: Configuration of the run.
        hydra: Content of the parent's HydraConfig as nested dicts.
        environment: Variables that a launcher would set: RANK, WORLD_SIZE and so on.
        parent_pid: Process number of the supervisor. This rank ends when the supervisor is gone.
    """
    die_with_parent(parent_pid)
    prepare_streams(is_run=True)
    os.environ.update(environment)
    HydraConfig.instance().cfg = cast(Any, OmegaConf.create(hydra))
    if this_process().rank == 0:
        node: Any = HydraConfig.get()
        configure_log(node.job_logging, node.verbose)
        start_log()
    else:
        logging.getLogger().setLevel(logging.ERROR)
        warnings.simplefilter("ignore")

    def train(*arguments: object) -> dict[str, float]:
        return runpy.run_path(script)[name](*arguments)

    run_rank(train, cfg, StopFlag().install(), parent_pid)
    exit_rank(errors.DONE)


def start_log() -> None:
    """Write the buffered log records to the log file, and from now on each record at once.

    The log file is created when the first record is written. So call it on rank 0 only, while the
    job holds the run lock. Until then the handlers of the log buffer all records.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.capacity = 0  # write each later record at once
            handler.flush()


def exit_rank(code: int) -> NoReturn:
    """End this process at once, after the logs and streams are flushed.

    os._exit is used instead of sys.exit, after which the destructor of a process group would wait
    for lost ranks.

    Args:
        code: Exit code of the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def record_ending(
    cfg: RunConfig, ending: Ending, rank: int, step: int | None, replace: bool = False
) -> bool:
    """Write how the run ended to status.json, unless another rank has written it before.

    A failure always replaces "done". An OSError is printed, not raised.

    Args:
        cfg: Configuration of the run.
        ending: Cause, exit code and message.
        rank: Rank that ended, unless `ending` names another rank.
        step: Last optimizer step of that rank. None if unknown.
        replace: Whether to replace a status that another rank has written.

    Returns:
        Whether the caller should print the ending: True if this call has written the status. If
        the file cannot be written, True on rank 0 and with `replace`.
    """
    try:
        return write_status(
            cfg.run_dir,
            cause=ending.cause,
            exit_code=ending.code,
            rank=rank if ending.rank is None else ending.rank,
            step=step,
            message=ending.line,
            traceback=ending.trace or None,
            replace=replace,
            **resume_facts(cfg),
        )
    except OSError as error:  # the disk that failed the run may refuse status.json, too
        print(f"warning: status.json cannot be written: {error}", file=sys.stderr)
        return replace or rank == 0


def report_ending(
    cfg: RunConfig, ending: Ending, rank: int, step: int | None = None, replace: bool = False
) -> None:
    """Write to status.json how the run ended, and print it.

    Only the first report of a run is written and printed. `replace`, and a failure after a run that
    is done, replace an earlier report and are printed, too. With debug=true every report is
    printed. An error is printed on stderr, after its traceback if there is one. The stop of a run
    that was asked to stop is logged, with the command that resumes it.

    Args:
        cfg: Configuration of the run.
        ending: Cause, exit code, message and traceback.
        rank: Rank that ended, unless `ending` names another rank.
        step: Last optimizer step of that rank. None if unknown.
        replace: Whether to replace what another rank has reported.

    Raises:
        OSError: If the stop is reported and the folder of the checkpoints cannot be read.
    """
    if not (record_ending(cfg, ending, rank, step, replace) or cfg.debug):
        return
    if ending.trace:
        print(ending.trace, file=sys.stderr)
    if ending.code != errors.PREEMPTED:
        lines = map(errors.printable, ending.line.split("\n"))
        print("\n".join(lines), file=sys.stderr, flush=True)
        return
    # A rank other than 0, whose log is off, may be the first to end.
    report = log.info if log.isEnabledFor(logging.INFO) else partial(print, flush=True)
    report(labels.line("stopped", ending.line))
    report(labels.line("next", resume_command(cfg)))


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """Return the folder of a run's newest checkpoint, or None if there is none.

    The checkpoint is not verified. Use the result for messages only.

    Args:
        run_dir: Run folder, which need not exist.

    Raises:
        OSError: If the folder of the checkpoints exists and cannot be read.
    """
    return CheckpointStore(Path(run_dir) / CHECKPOINTS_NAME).newest()


def resume_facts(cfg: RunConfig) -> dict[str, object]:
    """Return the entries of status.json from which the user learns how to resume the run.

    They are `checkpoint`, the folder of the newest checkpoint or None, and `resume`, the command.
    The checkpoint is not verified.

    Args:
        cfg: Configuration of the run.

    Raises:
        OSError: If the folder of the checkpoints exists and cannot be read.
    """
    return {"checkpoint": newest_checkpoint(cfg.run_dir), "resume": resume_command(cfg)}


def resume_command(cfg: RunConfig) -> str:
    """Return the shell command that resumes this run from its newest checkpoint, or repeats it.

    The command has the typed overrides and the folder of this run. If a training has saved a
    checkpoint, `ckpt_path=last` is added. Otherwise `ckpt_path` has the value of this run, if any.
    `from_run` is left out, because by now its overrides are among those of this run.

    Args:
        cfg: Configuration of the run. The typed overrides are read from Hydra.

    Raises:
        OSError: If the folder of the checkpoints exists and cannot be read.
    """
    typed = HydraConfig.get().overrides
    added = {"run_dir": cfg.run_dir, "ckpt_path": cfg.ckpt_path}
    removed = ("run_dir=", "ckpt_path=", "from_run=")
    if cfg.task == "fit" and newest_checkpoint(cfg.run_dir):
        added["ckpt_path"] = "last"
    words = [word for word in typed.hydra if word.startswith("hydra.searchpath=")]
    words += [word for word in typed.task if not word.lstrip("+").startswith(removed)]
    words += [shell.override(key, value) for key, value in added.items() if value is not None]
    return shell.train_command(*words)


def ways_to_save_memory(cfg: RunConfig) -> str:
    """Return the hint of an out-of-memory error: overrides with which a training needs less memory.

    It offers half the batch size, with twice the accumulation where this keeps the global batch
    size, activation checkpointing, and FSDP.

    Args:
        cfg: Configuration of the run.
    """
    batch_size = cfg.data.batch_size
    ways = []
    if batch_size > 1:
        ways.append(f"data.batch_size={batch_size // 2}")
        if cfg.data.global_batch_size is None:
            ways[0] += f" trainer.accumulate_grad_batches={2 * cfg.trainer.accumulate_grad_batches}"
    ways += ["model.activation_checkpointing=full", "strategy=fsdp on several devices"]
    tokens = cfg.data.extra.get("seq_len")
    return f"a micro-batch is {batch_size} sequences of {tokens}; try {', or '.join(ways)}"


def remove_old_starts(run_dir: str | Path) -> None:
    """Remove the folders with heartbeats and rendezvous files of earlier starts of a run.

    The folder of this start is kept, and one that cannot be removed stays without an error. Call it
    under the run lock, before any rank starts.

    Args:
        run_dir: Run folder.
    """
    current = attempt_folder(run_dir)
    for path in current.parent.glob("*"):
        if path != current:
            with suppress(OSError):  # NFS keeps the folder while a hung rank has its heartbeat open
                remove_tree(path)

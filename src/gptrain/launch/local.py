"""The parent of a run on several local devices: starts the ranks, watches them, ends them all."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gptrain import problems
from gptrain.launch.devices import Machine
from gptrain.launch.ending import newest_checkpoint, resume_command
from gptrain.launch.rank import BEATS_VARIABLE, rank_process
from gptrain.launch.restarts import FRUITLESS_STARTS
from gptrain.launch.start import choose_start
from gptrain.parallel.mesh import STORE_VARIABLE
from gptrain.resilience.ends import Preempted
from gptrain.resilience.heartbeat import StallWatch
from gptrain.resilience.signals import StopFlag, hold_back
from gptrain.resilience.status import read_status, result_path, write_status

log = logging.getLogger(__name__)
POLL_S = 0.05
GRACE_S = 6.0  # for the others to leave by themselves once one has failed
LINGER_S = 3.0  # for live ranks to print their stacks once one is hung
START_METHOD = "spawn"  # forked children of a process with threads and a GPU are not safe
WORTH_A_RESTART = (problems.FAILED, problems.HUNG)


def supervise(
    train: Callable, cfg: DictConfig, machine: Machine, run_id: str, stop: StopFlag
) -> dict[str, float]:
    """Runs one job in a process per device of this machine and returns its metrics.

    Each rank gets the environment that torchrun would give it, so it cannot tell the difference;
    but the ranks meet at a file, not at a port. A lost rank is worth a restart of all from the
    newest good checkpoint, launcher.max_restarts times, as long as they get anywhere.

    Raises:
        JobFailed: with the exit code.
    """
    left = cfg.launcher.max_restarts
    while (code := run_once(train, cfg, machine.n_local, stop)) in WORTH_A_RESTART:
        if stop or left == 0:
            break
        if not choose_start(cfg, run_id, machine.world_size, again=True):
            log.warning("warning: %d starts in a row got no further", FRUITLESS_STARTS)
            break
        left -= 1
        log.warning("warning: started again, %d more times at most", left)
    if code != problems.DONE:
        raise problems.JobFailed(code, (read_status(cfg.run_dir) or {}).get("message") or "")
    result = result_path(cfg.run_dir, cfg.task)
    return json.loads(result.read_text())["metrics"] if result.exists() else {}


def run_once(train: Callable, cfg: DictConfig, n_ranks: int, stop: StopFlag) -> int:
    """One attempt; the exit code of the job."""
    with tempfile.TemporaryDirectory(prefix="gptrain-") as folder:
        environment = {
            "GPTRAIN_SUPERVISED": "1",
            STORE_VARIABLE: str(Path(folder) / "store"),
            BEATS_VARIABLE: str(Path(folder) / "beats"),
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            "WORLD_SIZE": str(n_ranks),
            "LOCAL_WORLD_SIZE": str(n_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "GROUP_RANK": "0",
        }
        start, ranks = multiprocessing.get_context(START_METHOD), []
        try:
            for rank in range(n_ranks):
                place = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                arguments = (train, cfg, HydraConfig.instance().cfg, place, os.getpid())
                ranks.append(
                    start.Process(target=rank_process, args=arguments, name=f"rank {rank}")
                )
                with hold_back():  # a signal waits until the rank can take it as a wish
                    ranks[-1].start()
            watch(cfg, ranks, stop, Path(folder) / "beats")
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return job_code(cfg, ranks, stop)


def watch(cfg: DictConfig, ranks: list[BaseProcess], stop: StopFlag, beats: Path) -> None:
    """Returns when all ranks have ended, or when those left have had their time."""
    stalls = StallWatch(beats, cfg.launcher.timeout_s or cfg.strategy.timeout_s)
    forwarded, deadline_s = False, None
    while any(rank.is_alive() for rank in ranks):
        time.sleep(POLL_S)
        if stop and not forwarded:
            forwarded = True
            for rank in ranks:
                rank.terminate()  # SIGTERM: to a rank it is the same wish
        if deadline_s is not None:
            if time.monotonic() > deadline_s:
                return
            continue
        failed = [index for index, rank in enumerate(ranks) if rank.exitcode]
        stalled = [] if failed else stalls.stalled()
        if failed:
            deadline_s = time.monotonic() + GRACE_S
            if ranks[failed[0]].exitcode == problems.PREEMPTED and not stop:
                stop.set("a rank")  # asked alone, and left before the ranks could talk
            elif ranks[failed[0]].exitcode < 0 and not stop:
                tell_of_loss(cfg, failed[0], ranks[failed[0]])
        elif stalled:
            deadline_s = time.monotonic() + LINGER_S
            stall = stalled[0]
            how = "stopped" if stall.stopped else "waiting"
            line = (
                f"error: no progress for {stall.silent_s:.0f} s: rank {stall.rank} is {how} "
                f"at step {stall.step}, phase {stall.phase}"
            )
            tell(cfg, "hang", problems.HUNG, stall.rank, stall.step, line)


def tell_of_loss(cfg: DictConfig, index: int, rank: BaseProcess) -> None:
    """Speaks for a rank that was killed; the kernel does that when memory runs out, too."""
    reason = f"by signal {-rank.exitcode}"
    reason += ", maybe for want of memory" if rank.exitcode == -9 else ""
    line = f"error: rank {index} (process {rank.pid}) was killed {reason}"
    tell(cfg, "killed", problems.FAILED, index, None, line)


def tell(
    cfg: DictConfig, cause: str, code: int, rank: int | None, step: int | None, line: str
) -> None:
    """Says it on stderr and in status.json, over what other ranks made of it."""
    print(line, file=sys.stderr, flush=True)
    write_status(
        cfg.run_dir,
        cause=cause,
        exit_code=code,
        rank=rank,
        step=step,
        checkpoint=newest_checkpoint(cfg.run_dir),
        resume=resume_command(cfg),
        message=line,
        replace=True,
    )


def job_code(cfg: DictConfig, ranks: list[BaseProcess], stop: StopFlag) -> int:
    """The exit code of a job whose ranks have all ended: that of the first that failed."""
    codes = [rank.exitcode for rank in ranks]
    if not any(codes):
        return problems.DONE
    status = read_status(cfg.run_dir)
    if status is not None and status["exit_code"]:
        return status["exit_code"]
    if stop:  # before any rank had anything to save
        tell(cfg, "preempted", problems.PREEMPTED, None, None, str(Preempted()))
        return problems.PREEMPTED
    return next((code for code in codes if code > 0), problems.FAILED)

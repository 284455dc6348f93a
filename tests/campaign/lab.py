"""Runs of two ranks, started in a fraction of the time that importing torch would take.

The campaign's process has imported everything and computed nothing, so it has no threads; a run is
a fork of it in a session of its own, which does what `python train.py …` does once its config is
composed: launcher, ranks and data workers are real processes of their own.
"""

from __future__ import annotations

import copy
import gc
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gptrain.config.compose import Composer
from gptrain.config.schema import PROJECT, register
from gptrain.problems import ConfigError, JobFailed
from gptrain.resilience.status import read_status
from tests.campaign.plant import Fault, plant
from tests.campaign.truth import record

EVERY = 5  # steps between two checkpoints
LEAVING_S = 10.0  # what a run started may take to end after it
# A GPT that is as small as one can be and still has all parts; everything random is on.
TINY = (
    "trainer=cpu trainer.devices=2 trainer.max_epochs=-1 model=gpt_nano model.n_layers=2 "
    "model.d_model=32 model.n_heads=2 model.vocab_size=64 model.max_seq_len=32 model.dropout=0.1 "
    "data.seq_len=32 data.batch_size=2 data.num_samples=60 data.num_workers=1 "
    "trainer.val_check_interval=10 trainer.limit_val_batches=2 "
    "trainer.log_every_n_steps=1 trainer.enable_progress_bar=false logger=csv "
    f"checkpoint=every_n_steps checkpoint.every_n_steps={EVERY} strategy.timeout_s=60"
).split()


@dataclass
class Attempt:
    """One start of a run."""

    pid: int
    run_dir: Path
    log: Path
    started_s: float
    code: int | None = None

    def has_ended(self) -> bool:
        """Whether it has; its code is then known."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, negative for a signal; at the timeout it is killed, and that is -1000."""
        while not self.has_ended():
            if time.monotonic() > self.started_s + timeout_s:
                with self.log.open("a") as log:
                    print("killed at the timeout:", *session(self.pid), sep="\n", file=log)
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.code = -1000
            time.sleep(0.01)
        return self.code

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def status(self) -> dict:
        """What status.json says."""
        return read_status(self.run_dir) or {}

    def orphans(self) -> str | None:
        """What to say of its session's processes that are still there after LEAVING_S."""
        give_up = time.monotonic() + LEAVING_S
        while (left := list(session(self.pid))) and time.monotonic() < give_up:
            time.sleep(0.05)
        return f"processes left: {left}" if left else None


class Lab:
    """Starts runs in folders below one.

    Attributes:
        run_s: about what a run takes from its start to its end; where faults are thrown.

    Args:
        n_steps: of a run.
    """

    def __init__(self, folder: Path, n_steps: int):
        self.folder, self.n_steps, self.n_runs, self.run_s = folder, n_steps, 0, 0.0
        self.references: dict[tuple[str, ...], dict] = {}
        warm_up()
        register()
        self.composer = Composer("train")
        self.train = runpy.run_path(str(PROJECT / "train.py"))["train"]

    def reference(self, *options: str) -> dict:
        """The record of an uninterrupted run with these options."""
        if options not in self.references:
            attempt = self.start(self.new("reference"), *options)
            if code := attempt.wait(300.0):  # no fault: a busy machine may take its time
                raise RuntimeError(f"the reference run ended with {code}:\n{attempt.text()}")
            self.run_s = self.run_s or time.monotonic() - attempt.started_s
            self.references[options] = record(attempt.run_dir)
        return self.references[options]

    def new(self, name: str) -> Path:
        """A run folder that does not exist yet."""
        self.n_runs += 1
        return self.folder / f"{self.n_runs:04d}-{name}"

    def start(
        self, run_dir: Path, *options: str, fault: Fault | None = None, background: bool = False
    ) -> Attempt:
        """A run in a process of its own; `ckpt_path=last` goes on with it.

        Args:
            background: checkpoints are written in the background, small as they are.
        """
        self.n_runs += 1
        log = self.folder / f"{self.n_runs:04d}.log"
        composed = self.composer.compose_all([*TINY, f"trainer.max_steps={self.n_steps}", *options])
        pid = os.fork()
        if pid == 0:
            become_run(lambda: self._job(composed, run_dir), run_dir, log, fault, background)
        return Attempt(pid, run_dir, log, time.monotonic())

    def _job(self, composed: DictConfig, run_dir: Path) -> int:
        """What Hydra does around a job; the exit code."""
        from gptrain import launch

        with read_write(composed), open_dict(composed):
            composed.hydra.runtime.output_dir = str(run_dir)
        HydraConfig.instance().set_config(composed)
        configure_log(composed.hydra.job_logging, composed.hydra.verbose)
        cfg = copy.deepcopy(composed)
        with read_write(cfg), open_dict(cfg):
            del cfg["hydra"]
        OmegaConf.set_struct(cfg, True)
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            launch.run(self.train, cfg)
        except JobFailed as failure:
            return failure.code
        except ConfigError as error:
            print(error, file=sys.stderr)
            return error.code
        return 0

    def resume(self, run_dir: Path, *options: str) -> Attempt:
        """The next start of a run."""
        return self.start(run_dir, "ckpt_path=last", *options)


def warm_up() -> None:
    """Imports what a run imports, without computing anything."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import gptrain.assemble
    import gptrain.launch.local
    import gptrain.launch.rank
    import gptrain.lit.loggers  # noqa: F401

    gc.collect()
    gc.freeze()  # so that collections in the forks leave shared pages shared


def become_run(
    job: Callable[[], int], run_dir: Path, log: Path, fault: Fault | None, background: bool
) -> NoReturn:
    """In the child: runs the job with the fault in it."""
    code = 70
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        plant(fault, run_dir, background)
        sys.argv = ["train.py"]
        code = job()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def session(leader: int) -> Iterator[str]:
    """Live processes of a session: number, name, state and what each waits for in the kernel."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                name, _, rest = Path(entry.path, "stat").read_text().rpartition(")")
                fields, waits = rest.split(), Path(entry.path, "wchan").read_text()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] not in "ZX":
                yield f"{name}) {fields[0]} {waits}"

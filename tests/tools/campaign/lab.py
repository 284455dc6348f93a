"""Start runs with real ranks in less time than importing torch takes.

A server process has imported everything and has computed nothing, so that it has no threads. A run
is a fork of this process in its own session. Launcher, ranks and data workers are real processes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.forked import start_forked
from tests.processes import living
from tests.tools.campaign.truth import record

EVERY = 5  # steps between two checkpoints
WARM = ["train", "gptrain.config.cli", "gptrain.assemble", "gptrain.runtime.launch",
        "gptrain.lit.loggers", "gptrain.parallel.pipeline",
        "gptrain.checkpoints.tensors", "torch._dynamo",
        "tests.tools.campaign.faults"]  # fmt: skip
# Only one thread at a time may read exit codes: the system reports the code of a child only once.
_polling = threading.Lock()
# The smallest GPT that has all parts, with all sources of randomness enabled.
TINY = (
    "trainer=cpu trainer.devices=2 trainer.max_epochs=-1 model=gpt_nano model.n_layers=2 "
    "model.d_model=32 model.n_heads=2 model.vocab_size=64 model.max_seq_len=32 model.dropout=0.1 "
    "data.seq_len=33 data.batch_size=4 data.num_samples=96 trainer.val_check_interval=10 "
    "trainer.limit_val_batches=2 trainer.log_every_n_steps=1 trainer.enable_progress_bar=false "
    f"logger=none checkpoint=every_n_steps checkpoint.every_n_steps={EVERY} strategy.timeout_s=60 "
    "callbacks=none +callbacks.witness._target_=tests.tools.campaign.faults.Witness ckpt_path=last "
    "on_spike=skip spike.window=8"
).split()


@dataclass
class Attempt:
    """One start of a run."""

    process: BaseProcess
    run_dir: Path
    log: Path

    @property
    def code(self) -> int | None:
        """Exit code of the run, negative for a signal, or None while the run continues."""
        with _polling:
            return self.process.exitcode

    def wait(self, timeout_s: float = 120.0) -> int:
        """Wait for the exit code and return it. After the timeout, kill all processes first."""
        give_up_s = time.monotonic() + timeout_s
        while self.code is None:
            if time.monotonic() > give_up_s:
                os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(0.02)
        return self.code

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def left(self) -> list[str]:
        """Return the id, name and state of all processes of the run that are alive."""
        session = str(self.process.pid)
        return [
            f"{pid} {process[0]} {process[1]}"
            for pid, process in living().items()
            if process[4] == session
        ]


class Lab:
    """Starts runs in subfolders of a folder, with `n_steps` steps if their words do not differ."""

    def __init__(self, folder: Path, n_steps: int):
        os.environ["OMP_NUM_THREADS"] = "1"
        self.folder, self.n_steps, self.run_s = folder, n_steps, 0.0
        self.numbers = itertools.count(1)
        self.references: dict[tuple[str, ...], tuple[Path, dict]] = {}
        self.making = defaultdict(threading.Lock)  # words of a reference -> lock while it trains
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(WARM)

    def reference(self, *words: str) -> tuple[Path, dict]:
        """Return the folder and record of a run without a fault, which keeps all checkpoints."""
        with self.making[words]:
            if words not in self.references:
                attempt = self.start(self.new("reference"), "checkpoint.keep=99", *words)
                started_s = time.monotonic()
                assert attempt.wait(300.0) == 0, f"the reference failed: {attempt.text()}"
                self.run_s = self.run_s or time.monotonic() - started_s
                self.references[words] = attempt.run_dir, record(attempt.run_dir)
        return self.references[words]

    def cut_back(self, step: int, *words: str) -> Path:
        """Copy the reference run as if it had been killed after the checkpoint of a step."""
        run_dir = self.new("copy")
        shutil.copytree(self.reference(*words)[0], run_dir)
        for path in (run_dir / "checkpoints").glob("step-*"):
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        (run_dir / "result.json").unlink()
        return run_dir

    def new(self, name: str) -> Path:
        """Return the path of a new run folder."""
        return self.folder / f"{next(self.numbers):04d}-{name}"

    def start(self, run_dir: Path, *words: str) -> Attempt:
        """Start `python train.py <words>`, which resumes from a checkpoint if there is one."""
        log = self.folder / f"{run_dir.name}-{next(self.numbers):04d}.log"
        words = (*TINY, f"trainer.max_steps={self.n_steps}", f"run_dir={run_dir}", *words)
        process = self.context.Process(target=become_run, args=(list(words), log))
        with _polling:
            process.start()
        return Attempt(process, run_dir, log)


def become_run(words: list[str], log: Path) -> None:
    """Run the command in this child process and exit, with the output in a file.

    If the last word is TMPDIR=..., the child uses this folder for temporary files.
    """
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    if words[-1].startswith("TMPDIR="):
        os.environ["TMPDIR"], tempfile.tempdir = words.pop().removeprefix("TMPDIR="), None
    import train
    from gptrain.config import cli
    from gptrain.runtime import launch

    launch.elastic_launch = partial(start_forked, log, log, method="fork")
    code = cli.run_command(train.main, words)
    sys.stdout.flush()
    os._exit(code)

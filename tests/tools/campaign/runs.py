"""Start runs with real ranks in less time than importing torch takes, and compare their results.

A run is a fork of the tests' server process, in a session of its own. Launcher, ranks and data
workers are real processes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from gptrain.runtime import launch
from tests.forked import server, start_forked
from tests.processes import living
from tests.run import Run, run_script, same

EVERY = 5  # steps between two checkpoints
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
    "on_spike=skip spike.window=8 allow_changes=[callbacks]"
).split()


class Attempt:
    """One start of `python train.py <words>`, which resumes from a checkpoint if there is one."""

    def __init__(self, run_dir: Path, log: Path, words: list[str]):
        self.run_dir, self.log = run_dir, log
        self.process = server().Process(target=become_run, args=(words, log))
        with _polling:
            self.process.start()

    @property
    def code(self) -> int | None:
        """Exit code of the run, negative for a signal, or None while the run continues."""
        with _polling:
            return self.process.exitcode

    def wait(self, timeout_s: float = 120.0) -> int:
        """Wait for the exit code and return it. After the timeout, kill all processes first."""
        give_up_s = time.monotonic() + timeout_s
        while (code := self.code) is None:
            if time.monotonic() > give_up_s:
                os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(0.02)
        return code

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def left(self) -> list[str]:
        """Return the name and state of all processes of the run that are alive."""
        session = str(self.process.pid)
        return [
            f"{name} {state}" for name, state, _, _, of, *_ in living().values() if of == session
        ]


class Lab:
    """Starts runs in subfolders of a folder, with `n_steps` steps if their words do not differ."""

    def __init__(self, folder: Path, n_steps: int):
        os.environ["GPTRAIN_TEST_RUNS"] = str(folder)  # the server keeps composed configs there
        self.folder, self.n_steps, self.run_s = folder, n_steps, 0.0
        self.numbers = itertools.count(1)
        self.references: dict[tuple[str, ...], tuple[Path, dict]] = {}
        self.making = defaultdict(threading.Lock)  # words of a reference -> lock while it trains

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
        run_dir = shutil.copytree(self.reference(*words)[0], self.new("copy"))
        Run(run_dir, 0, "", "").cut_back(step)
        return run_dir

    def new(self, name: str) -> Path:
        """Return the path of a new run folder."""
        return self.folder / f"{next(self.numbers):04d}-{name}"

    def start(self, run_dir: Path, *words: str) -> Attempt:
        log = self.folder / f"{run_dir.name}-{next(self.numbers):04d}.log"
        steps = f"trainer.max_steps={self.n_steps}"
        return Attempt(run_dir, log, [*TINY, steps, f"run_dir={run_dir}", *words])


def become_run(words: list[str], log: Path) -> None:
    """Run the command in this child process and exit, with the output in a file."""
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    launch.elastic_launch = partial(start_forked, log, log, method="fork")
    code = run_script(words)
    sys.stdout.flush()
    os._exit(code)


def record(run_dir: Path) -> dict[str, Any]:
    """Return what a run has computed: its last checkpoint, micro-steps and rows of metrics.jsonl.

    Raises:
        AssertionError: If a micro-step that was done twice had different results, or a step has
            two rows.
    """
    run = Run(run_dir, 0, "", "")
    results: dict[str, Any] = run.state()
    results["counters"].get("options", {}).pop("callbacks.fault", None)  # the reference has none
    for path in run_dir.glob("witness-*.txt"):
        for line in path.read_text().splitlines():
            number, _, rest = line.partition(" ")
            before = results.setdefault(f"{path.stem} {number}", rest)
            assert before == rest, f"{path.stem} {number}: {before}, then {rest}"
    for row in run.rows:
        name = f"row {row['step']}"
        assert name not in results, f"{name} is there twice"
        # perf/ values are times, which differ between equal runs
        results[name] = {key: value for key, value in row.items() if "perf/" not in key}
    return results


def difference(run_dir: Path, reference: dict[str, Any]) -> str | None:
    """Return how a run differs from the reference, or None if it is equal bit for bit."""
    differences = same(record(run_dir), reference)
    return f"it differs: {', '.join(differences[:9])}" if differences else None


def repeated(run_dir: Path) -> int:
    """Return the number of micro-steps that rank 0 has repeated."""
    path = run_dir / "witness-0.txt"
    numbers = [line.split()[0] for line in path.open()] if path.exists() else []
    return len(numbers) - len(set(numbers))

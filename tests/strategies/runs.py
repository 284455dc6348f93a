"""Complete runs of train.py. Each run is made once and read by all tests that need it.

    run = runs("strategy=fsdp", "trainer.devices=2")
    run.column("train/loss"), run.record(rank=1)

A run is identified by its overrides. The first test that needs a run makes it, in any process of
the test suite, and the other processes wait. So every test can run alone (-k). The ranks are forked
(tests/forked.py); otherwise a run is what a user starts. `own_parts.Record` records each rank.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import logged_rows

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "strategies")]

RTOL = 1e-5  # fp32 sums in another order differ by 1e-6
N_STEPS, MAX_NORM = 8, 0.5

# V = 61 and T = 15 are not multiples of two ranks. One process takes two micro-steps of eight
# sequences per step. Ranks take micro-steps of four, with different numbers of valid targets.
MODEL = (
    "model=gpt_nano", "model.vocab_size=61", "model.d_model=32", "model.n_heads=4",
    "model.n_layers=4", "model.max_seq_len=16",
)  # fmt: skip
DATA = (
    "data.train._target_=tests.truth.own.Ragged", "data.train.num_samples=200", "data.train.seed=3",
    "data.val._target_=tests.truth.own.Ragged", "data.val.num_samples=21", "data.val.seed=4",
)  # fmt: skip
WORDS = (
    "data.seq_len=15", "data.batch_size=4", "data.global_batch_size=16",
    "optimizer.lr=1e-3", "scheduler.warmup_steps=2", f"scheduler.total_steps={N_STEPS}",
    f"trainer.gradient_clip_val={MAX_NORM}", f"trainer.max_steps={N_STEPS}",
    "trainer.accelerator=cpu", "trainer.val_check_interval=4", "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false", "strategy.timeout_s=60",
    "callbacks=none", "+callbacks.record._target_=own_parts.Record",
    "checkpoint.keep=9", "logger=none",
)  # fmt: skip
PLACES = {
    "single": ("strategy=single", "data.batch_size=8"),
    "ddp": ("strategy=ddp", "trainer.devices=2"),
    "fsdp": ("strategy=fsdp", "trainer.devices=2"),
    "tensor_parallel": ("strategy=tensor_parallel", "trainer.devices=2"),
    "pipeline": ("strategy=pipeline", "trainer.devices=2"),
}
DROPOUT = (
    "model.dropout=0.1", "model.n_layers=2", "trainer.max_steps=6", "trainer.val_check_interval=3",
)  # fmt: skip


@dataclass
class Run:
    """A finished run.

    Attributes:
        output: Everything that its processes printed.
    """

    folder: Path
    code: int
    output: str

    @cached_property
    def rows(self) -> list[dict]:
        """Rows of metrics.jsonl, one per logged step."""
        return logged_rows(self.folder)

    def column(self, name: str) -> list[float]:
        """Return the values of one column, without the steps that do not have it."""
        return [row[name] for row in self.rows if row.get(name) is not None]

    def record(self, rank: int = 0) -> dict:
        """Return what `own_parts.Record` recorded in one rank."""
        return torch.load(self.folder / f"record-{rank}.pt", weights_only=True)


class Runs:
    """A cache of runs.

    Args:
        folder: Folder that all processes of the test suite share.
    """

    def __init__(self, folder: Path):
        self.folder, self.made = folder, {}

    def __call__(
        self,
        *words: str,
        model: tuple[str, ...] = MODEL,
        data: tuple[str, ...] = DATA,
        code: int = 0,
    ) -> Run:
        """Return the run with WORDS and the given overrides.

        Args:
            words: Overrides of the command.
            model: Overrides of the model group.
            data: Overrides of the data group.
            code: Exit code that the run must have.
        """
        words = (*WORDS, *model, *data, *words)
        key = json.dumps(words)
        if key not in self.made:
            self.made[key] = self._find_or_make(key, words)
        run = self.made[key]
        if run.code != code:
            pytest.fail(f"exit code {run.code}, not {code}:\n{run.output}", pytrace=False)
        return run

    def _find_or_make(self, key: str, words: tuple[str, ...]) -> Run:
        name = hashlib.sha1(key.encode()).hexdigest()[:12]
        folder, end = self.folder / name, self.folder / f"{name}.json"
        output = self.folder / f"{name}.txt"
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if not end.exists():
                shutil.rmtree(folder, ignore_errors=True)
                code = run_train([*words, f"run_dir={folder}"], output)
                end.write_text(json.dumps(code))
        return Run(folder, json.loads(end.read_text()), output.read_text(errors="replace"))


def run_train(words: list[str], output: Path) -> int:
    """Run `python train.py <words>` in this process and forked ranks; return the exit code."""
    from forked import forked_ranks

    import train
    from gptrain.config import cli

    with open(output, "a", buffering=1) as file:
        print("python train.py", *words, file=file)
        with redirect_stdout(file), redirect_stderr(file), forked_ranks(output, output):
            try:
                return cli.run_command(train.main, words)
            finally:
                if dist.is_initialized():  # a group with this process only
                    dist.destroy_process_group()


def check_close(values: list[float], expected: list[float], rtol: float = RTOL) -> None:
    """Check that two columns are equal up to rounding."""
    assert len(values) == len(expected) > 0, (values, expected)
    for a, b in zip(values, expected, strict=True):
        assert abs(a / b - 1) < rtol, (values, expected)


def check_losses(run: Run, truth: Run, rtol: float = RTOL) -> None:
    """Check losses, unclipped gradient norms and validations against the reference run."""
    for name in ("train/loss", "grad_norm", "val/loss"):
        losses = run.column(name)
        check_close(losses, truth.column(name)[: len(losses)], rtol)


def shared_folder(tmp_path_factory) -> Path:
    """Return one folder for all processes of this test suite."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    (folder / "runs").mkdir(exist_ok=True)
    return folder / "runs"

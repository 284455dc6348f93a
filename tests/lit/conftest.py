"""Fixtures that run train.py in this process. Each run takes about a second."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gptrain
import train
from gptrain.config import cli
from tests.conftest import Finished
from tests.forked import forked_ranks

OWN = "tests.lit.own"
TINY = (
    "model=gpt_nano", "model.d_model=16", "model.n_heads=2", "model.n_layers=1",
    "data.num_samples=64", "data.seq_len=17", "data.val.num_samples=8", "data.batch_size=4",
    "trainer.max_steps=6", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1", "logger=none", "callbacks=none",
)  # fmt: skip
ACCURACY = (
    "+module.metrics.top5={_target_: torchmetrics.classification.MulticlassAccuracy,"
    " num_classes: 256, top_k: 5, average: micro}"
)
TRACES = {"metrics.jsonl", "result.json", "state.ckpt"}  # files that only a started run writes


class Ended(Finished):
    """A finished run: its folder, and in `out` everything that its ranks printed."""

    @property
    def errors(self) -> list[str]:
        return [line for line in self.out.splitlines() if line.startswith("error: ")]

    @property
    def status(self) -> dict[str, Any]:
        """Content of status.json."""
        return json.loads((self.folder / "status.json").read_text())

    @property
    def seen(self) -> list[dict[str, Any]]:
        """Records that the test callbacks appended to seen.jsonl."""
        return [json.loads(line) for line in (self.folder / "seen.jsonl").read_text().splitlines()]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if row.get(name) is not None]

    def steps(self) -> list[int]:
        return sorted(int(p.name[5:]) for p in (self.folder / "checkpoints").glob("step-*"))

    def copy_until(self, step: int, name: str) -> str:
        """Copy this run as if it was killed after the checkpoint of `step`; return the path."""
        copy = self.folder.parent / name
        shutil.copytree(self.folder, copy)
        for path in (copy / "checkpoints").glob("step-*"):
            if int(path.name[5:]) > step:
                shutil.rmtree(path)
        for left in ("result.json", "seen.jsonl"):
            (copy / left).unlink(missing_ok=True)
        return str(copy)


Fit = Callable[..., Ended]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Path, dict[tuple[str, ...], Ended]]:
    """A folder for runs that several tests of a file read, and these runs by their overrides."""
    return tmp_path_factory.mktemp("shared"), {}


@pytest.fixture
def fit(tmp_path, capfd, shared) -> Fit:
    """Return a function that runs `python train.py` with TINY and the given overrides.

    The function checks the exit code. A refused command prints one error line and writes no file,
    unless `begun` is true. A run with `name=None` is shared: it is made once for all tests of a
    file, and these tests only read it.
    """

    def run(*words: str, name: str | None = "run", code: int = 0, begun: bool = False) -> Ended:
        common, made = shared
        if name is None:
            if words not in made:
                made[words] = run(*words, name=f"{common / str(len(made))}")
            return made[words]
        folder = tmp_path / name
        before = folder.exists()
        tiny = () if any(word.startswith("from_run=") for word in words) else TINY
        if any(word.startswith("data=") for word in words):
            tiny = [word for word in tiny if "num_samples" not in word]
        if "~data" in words:  # a LightningDataModule has keys of its own
            tiny = [word for word in tiny if not word.startswith("data.")]
        ranks = tmp_path / f"{name}.txt"  # output of the ranks
        with forked_ranks(ranks, ranks):
            exit_code = cli.run_command(train.main, [*tiny, f"run_dir={folder}", *words])
        output = "".join(capfd.readouterr())
        if ranks.exists():
            output += ranks.read_text()
            ranks.unlink()
        ended = Ended(exit_code, output, "", folder)
        assert exit_code == code, ended.out
        if code == 2:
            assert len(ended.errors) == 1 and "Traceback" not in ended.out, ended.out
            left = {path.name for path in folder.rglob("*")} if folder.exists() else set()
            assert before or begun or not left & TRACES, left
        return ended

    return run


@pytest.fixture
def refused(fit) -> Callable[..., str]:
    """Return a function that checks that a command is refused and returns its only error line."""
    return lambda *words: fit(*words, name="refused", code=2).errors[0]


def differences(first: Any, second: Any, at: str = "") -> list[str]:
    """List the entries in which two checkpoints are not bit-identical."""
    if isinstance(first, torch.Tensor):
        is_same_kind = isinstance(second, torch.Tensor) and first.dtype == second.dtype
        return [] if is_same_kind and torch.equal(first, second) else [f"{at}: {first} != {second}"]
    if isinstance(first, dict):
        entries = [f"{at}.{key}: on one side only" for key in first.keys() ^ second.keys()]
        both = first.keys() & second.keys()
        return entries + [x for k in both for x in differences(first[k], second[k], f"{at}.{k}")]
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return [f"{at}: {len(first)} != {len(second)}"]
        pairs = enumerate(zip(first, second, strict=True))
        return [x for i, (a, b) in pairs for x in differences(a, b, f"{at}[{i}]")]
    same = first == second or (first != first and second != second)
    return [] if same else [f"{at}: {first} != {second}"]


def tensors(source: Path) -> dict[str, torch.Tensor]:
    """Return the state dict of the net that gptrain.load builds from `source`."""
    return gptrain.load(source).state_dict()

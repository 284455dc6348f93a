"""Long work shows how far it is, to a person at a terminal and to nobody else."""

from __future__ import annotations

import io
import logging
import sys

import pytest
import torch

from gptrain.checkpoints import manifest
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core.lengths import BatchPlan, RunLengths
from gptrain.core.progress import progress_bar
from gptrain.data import TextDataset, prepare
from gptrain.lit.callbacks.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "stream, rank, is_shown",
    [(Terminal, "0", True), (Terminal, "1", False), (io.StringIO, "0", False)],
)
def test_a_terminal_shows_it_once_and_a_file_gets_nothing(stream, rank, is_shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("RANK", rank)
    with progress_bar("verifying", 1000) as bar:
        if not bar.disable:
            bar.start_t = bar.last_print_t = bar.start_t - 3  # pretend a start 3 s ago
        bar.update(500)
    output = sys.stderr.getvalue()
    if not is_shown:
        assert not output
        return
    assert "verifying:  50%" in output and "| 500/1.00k [" in output and "B/s" in output
    assert output.endswith("\r")  # the bar was removed from the screen


def test_a_bar_appears_for_long_work_only(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar("verifying", 1000) as bar:
        bar.update(500)
    assert not sys.stderr.getvalue()


def test_the_bar_of_a_training_shows_the_last_logged_step():
    lengths = RunLengths(BatchPlan(4, 1, 1), 1, 50, n_steps=40, validate_every=9, unit="samples")
    values = {"train/loss": torch.tensor(2.5), "lr": 3e-4, "step": 10, "perf/step_s": 2.0,
              "perf/tokens_per_s": 12345.6}  # fmt: skip
    bar = ProgressBar()
    bar.take_step(values, lengths)
    shown = {name: str(value) for name, value in bar.logged.items() if name != "train/loss"}
    assert shown == {"lr": "0.0003", "samples/s": "12,346", "left": "0:01:00"}


class Count:
    """A bar that only counts."""

    def __init__(self, what: str, n_bytes: int):
        self.what, self.total, self.n = what, n_bytes, 0

    def update(self, n: int) -> None:
        self.n += n

    def __enter__(self) -> Count:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_verifying_a_checkpoint_counts_its_bytes(tmp_path, monkeypatch):
    store, made = CheckpointStore(tmp_path, "run"), []
    monkeypatch.setattr(manifest, "progress_bar", lambda *of: made.append(Count(*of)) or made[-1])
    with store.writing(1) as draft, draft.open("state.ckpt") as file:
        file.write(b"x" * 3_000_000)
    store.newest_intact()
    assert [(bar.what, bar.n, bar.total) for bar in made] == [("verifying", 3_000_000, 3_000_000)]


def test_preparing_a_corpus_counts_its_bytes_and_is_logged_once(tmp_path, monkeypatch, caplog):
    made, text = [], b"a line\n" * 300_000 + b"without a newline, which is added"
    monkeypatch.setattr(prepare, "progress_bar", lambda *of: made.append(Count(*of)) or made[-1])
    (tmp_path / "text.txt").write_bytes(text)
    for _ in range(2):
        with caplog.at_level(logging.INFO):
            TextDataset.from_corpus(
                "train", 16, tmp_path / "text.txt", "bytes", cache_dir=tmp_path / "cache"
            )
    assert [(bar.what, bar.n, bar.total) for bar in made] == [("tokenizing", len(text), len(text))]
    lines = [line for line in caplog.messages if line.startswith("preparing")]
    assert lines == [f"preparing 2.1 MB of text in {tmp_path}/cache, once"]

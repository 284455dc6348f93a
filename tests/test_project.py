"""Yours: each of your parts once, then all of them together, on one device and on two."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from project.data import MyDigits
from project.module import MyAccuracy
from project.net import MyLSTM

ROOT = Path(__file__).parents[1]
MINE = ("model=my_lstm", "data=my_digits", "module=my_module", "callbacks=my_callback")


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Return a function that runs `python train.py <options>` and returns the run folder."""

    def train(*options: str) -> Path:
        here = ("trainer.accelerator=cpu", f"run_dir={tmp_path}/run")
        monkeypatch.setattr(sys, "argv", ["train.py", *here, *options])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        assert not left.value.code
        return tmp_path / "run"

    return train


def test_the_net_makes_logits_of_tokens_that_do_not_see_the_future():
    net, tokens = MyLSTM(vocab_size=10, d_model=8), torch.randint(10, (2, 6))
    logits = net(tokens)
    assert logits.shape == (2, 6, 10)
    tokens[:, 4:] = 0
    assert torch.equal(net(tokens)[:, :4], logits[:, :4])


def test_a_sample_counts_and_its_targets_are_the_tokens_that_come_next():
    data = MyDigits(first=8, n_samples=3, seq_len=5)
    tokens, targets = data[1]
    assert len(data) == 3
    assert tokens.tolist() == [9, 1, 0, 1, 1] and targets.tolist() == [1, 0, 1, 1, 1]


def test_the_accuracy_counts_targets_among_the_likeliest_tokens():
    logits, targets = torch.tensor([[3.0, 2.0, 1.0]] * 3), torch.tensor([0, 1, 2])
    for k, right in ((1, 1 / 3), (2, 2 / 3)):
        metric = MyAccuracy(k)
        metric.update(logits, targets)
        assert metric.compute() == pytest.approx(right)


def test_every_part_goes_through_one_step(run):
    # trainer=gpu compiles blocks, and the LSTM has none.
    run(*MINE, "trainer=gpu", "trainer.devices=1", "trainer.fast_dev_run=true")


@pytest.mark.slow
def test_all_of_it_trains_on_two_ranks(run):
    steps = ("trainer.max_steps=20", "trainer.log_every_n_steps=5", "logger=none")
    folder = run(*MINE, *steps, "trainer.devices=2", "strategy=ddp", "optimizer.lr=1e-2")
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    assert metrics["val/loss"] < 2.2  # below ln 10 = 2.303 of a guess
    assert 0.1 < metrics["val/my_accuracy"] <= 1
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert {"train/entropy", "weights_norm"} <= {name for row in rows for name in json.loads(row)}

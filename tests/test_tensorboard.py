"""TensorBoard shows the runs, checked in a real browser."""

from __future__ import annotations

import json

import pytest

import train
from gptrain.config import cli
from tests.conftest import TINY
from tests.tools.browser import browser, tensorboard, wait

pytestmark = pytest.mark.slow
WORDS = (
    *TINY, "trainer.log_every_n_steps=1", "trainer.val_check_interval=2", "trainer.max_steps=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A sweep of two and a resumed run on text, made once by the commands that users type."""
    folder = tmp_path_factory.mktemp("seen")
    (folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    text = ("data=text", f"data.path={folder}/words.txt", f"output_dir={folder}/o")
    first = (*text, f"run_dir={folder}/one", "callbacks.sample.n_tokens=8", "scheduler=constant")
    sweep = ("-m", f"run_dir={folder}/sweep", "optimizer.lr=1e-3,3e-4")
    for words in (sweep, first, (*first, "trainer.max_steps=4", "ckpt_path=last")):
        assert cli.run_command(train.main, [*WORDS, *words]) == 0
    return folder


@pytest.fixture(scope="module")
def window():
    with browser() as window:
        yield window


def points(window) -> list[tuple[int, float]]:
    """Step and value of the training losses, as TensorBoard gives them to its page."""
    reply = window.run(
        "const found = new XMLHttpRequest(); found.open('GET', "
        "'/data/plugin/scalars/scalars?run=.&tag=train/loss', false); found.send();"
        "return found.responseText;"
    )
    return [(step, value) for _, step, value in json.loads(reply)]


def test_a_run_that_was_resumed_shows_losses_first_and_its_words(window, outputs):
    with tensorboard(outputs / "one") as address:
        window.open(f"{address}#timeseries")
        text = window.wait_for(" perf ", " tokens ", " train ", " val ")
        assert "epoch" not in text
        shown = wait(lambda: points(window), lambda values: len(values) >= 4, "the resumed steps")
        assert [step for step, _ in shown] == [1, 2, 3, 4]
        window.open(f"{address}?#text")
        window.wait_for("run/sample/text_summary")
        window.open(f"{address}?2#hparams")
        text = window.wait_for("val/loss", "callbacks.sample.n_tokens", "8.0000")
        assert "model.d_model" in text and "checkpoint" not in text and "run_dir" not in text


def test_a_sweep_shows_what_varies_and_what_runs_are_compared_by(window, outputs):
    with tensorboard(outputs / "sweep") as address:
        window.open(f"{address}#timeseries")
        window.wait_for(" train ", "0-lr_0.001", "1-lr_0.0003")
        window.open(f"{address}?#hparams")
        text = window.wait_for("val/loss", "perf/tokens_per_s", "1-lr_0.0003")
        assert "optimizer.lr" in text
        assert "d_model" not in text and "checkpoint" not in text

"""What a person sees of runs in TensorBoard, in a real browser."""

from __future__ import annotations

import pytest
from browser import browser, tensorboard
from forked import forked_ranks

import train
from gptrain.config import cli
from tests.conftest import TINY

pytestmark = pytest.mark.slow
WORDS = (
    *TINY, "trainer.log_every_n_steps=1", "trainer.val_check_interval=2", "trainer.max_steps=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A sweep of four and a resumed run, made once by the commands that users type."""
    folder = tmp_path_factory.mktemp("seen")
    one = (f"run_dir={folder}/one", "scheduler=constant")
    for words in (
        ("-m", f"run_dir={folder}/sweep", "optimizer.lr=1e-3,3e-4", "seed=1,2"),
        one,
        (*one, "trainer.max_steps=4", "ckpt_path=last"),
    ):
        with forked_ranks(folder / "said", folder / "said"):
            assert cli.run_command(train.main, [*WORDS, *words]) == 0
    return folder


@pytest.fixture(scope="module")
def window():
    with browser() as window:
        yield window


def test_a_run_shows_losses_first_and_what_was_typed(window, outputs):
    with tensorboard(outputs / "one") as address:
        window.open(f"{address}#timeseries")
        text = window.wait_for("loss 2 cards", "optim 2 cards", "perf 5 cards")
        assert text.index("loss 2 cards") < text.index("optim 2 cards") < text.index("perf 5 cards")
        assert "epoch" not in text
        window.open(f"{address}?2#hparams")
        text = window.wait_for("loss/val", "model.d_model", "32.000")
        assert "checkpoint" not in text and "run_dir" not in text


def test_a_sweep_shows_what_varies_and_what_runs_are_compared_by(window, outputs):
    names = [f"{n}-lr_{lr}-seed_{1 + n % 2}" for n, lr in enumerate(2 * ["0.001"] + 2 * ["0.0003"])]
    with tensorboard(outputs / "sweep") as address:
        window.open(f"{address}#timeseries")
        window.wait_for("loss 2 cards", *names)
        window.open(f"{address}?#hparams")
        text = window.wait_for("loss/val", "perf/tokens_per_s", names[3][:12])
        assert "optimizer.lr" in text and "seed" in text
        assert "d_model" not in text and "checkpoint" not in text

"""The recipe `ladder`: a scaling law is found, and tiny runs are trained once."""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest

pytest.importorskip("scipy")  # not in the extra dev: torchmetrics imports it at each start

from recipes import ladder

# E, A, a, B, b of Hoffmann et al. 2022, arXiv:2203.15556.
CHINCHILLA = (1.69, 406.4, 0.34, 410.7, 0.28)
RUNS = np.array([*product((1e6, 2e6, 4e6, 8e6), (2e7, 8e7, 32e7))]).T


@pytest.mark.slow
def test_the_constants_of_hoffmann_et_al_are_found_from_losses_without_noise():
    n, d = RUNS
    found = ladder.fit(n, d, ladder.law(CHINCHILLA, n, d))
    assert found == pytest.approx(CHINCHILLA, rel=1e-4)


def test_runs_with_noise_predict_a_model_that_is_four_times_as_large(monkeypatch):
    n, d = RUNS
    loss = ladder.law(CHINCHILLA, n, d) * np.exp(0.001 * np.random.default_rng(0).normal(size=12))
    target = (4 * n.max(), 4 * d.max())
    monkeypatch.setattr(ladder, "TARGET", target)
    monkeypatch.setattr(ladder, "N_SAMPLES", 50)
    best = ladder.fit(n, d, loss)
    truth = ladder.law(CHINCHILLA, *target)
    assert ladder.law(best, *target) == pytest.approx(truth, rel=0.01)
    low, high = ladder.interval(n, d, loss, best)
    assert low < truth < high and high - low < 0.05 * truth


@pytest.mark.slow
def test_missing_runs_are_trained_and_finished_ones_are_read(tmp_path, monkeypatch, capfd):
    net = "model.d_model={0} model.n_heads=2 model.n_layers=1"
    sizes = {net.format(width): (256, 512) for width in (8, 16, 32)}
    monkeypatch.setattr(ladder, "SIZES", sizes)
    monkeypatch.setattr(ladder, "N_SAMPLES", 3)
    words = (
        "model=gpt_nano", "model.vocab_size=64", "data.seq_len=16", "data.batch_size=4",
        "data.num_samples=64", "trainer.accelerator=cpu", "trainer.limit_val_batches=1",
        f"output_dir={tmp_path}",
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["ladder.py", str(tmp_path / "runs"), *words])
    ladder.main()
    first = capfd.readouterr().out
    assert first.count("result ") == 6 and "target    val/loss" in first
    ladder.main()
    again = capfd.readouterr().out
    assert "result " not in again and again.splitlines()[-1] == first.splitlines()[-1]

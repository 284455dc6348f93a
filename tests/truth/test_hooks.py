"""A hook sees the finished gradients of a step, and what it makes of them is what is applied."""

from __future__ import annotations

import pytest

from tests.truth.own_losses import see
from tests.truth.test_own_losses import PLACES


def test_clipping_in_a_hook_is_clipping_by_the_trainer(train):
    own = see(train, "ClipsInHook", *PLACES["single"])
    trainers = see(train, "Recorded", *PLACES["single"], "trainer.gradient_clip_val=0.5")
    assert own.code == trainers.code == 0, own.text + trainers.text
    assert own.column("train/loss") == pytest.approx(trainers.column("train/loss"), rel=2e-6)
    norms = trainers.column("grad_norm")
    assert min(norms) > 0.5
    assert own.norms[0] == pytest.approx(norms, rel=2e-5)


def test_clipping_in_configure_gradient_clipping_is_clipping_by_the_trainer(train):
    own = see(train, "ClipsByTrainer", *PLACES["pipeline"])
    trainers = see(train, "Recorded", *PLACES["pipeline"], "trainer.gradient_clip_val=0.5")
    assert own.column("train/loss") == pytest.approx(trainers.column("train/loss"), rel=2e-6)

"""A validation that fails costs no training: a step is saved before its validation."""

from __future__ import annotations

import pytest

from tests.lit.conftest import OWN

CALLBACKS = f"{OWN}.callbacks"
NODES = f"+callbacks.nodes._target_={CALLBACKS}.OneRankPerNode"
TWO = ("trainer.devices=2", "data.batch_size=2", NODES)


def test_all_ranks_save_when_the_minutes_have_passed_on_rank_0(fit):
    """Several ranks learn rank 0's decision one step later. The last step is always saved."""
    words = ("checkpoint.every_minutes=1e-9", "checkpoint.keep=9", "data.num_samples=64", *TWO)
    assert fit(*words).steps() == list(range(2, 7))


BROKEN = {
    "short": (65, "data.train: samples 15, 18, 5, 6: "),
    "raises": (70, "the sample is broken"), "cannot be read": (73, "Permission denied"),
    "a token above the vocabulary": (65, "data.train: samples 15, 18, 5, 6: token 1250"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_sample_in_the_middle_of_an_epoch_is_named(fit, kind):
    words = (f"data.train._target_={OWN}.data.Broken", f"+data.train.kind='{kind}'")
    code, message = BROKEN[kind]
    failed = fit(*words, "data.train.num_samples=24", code=code)
    assert failed.status["step"] > 0 and message in failed.errors[0]


@pytest.mark.parametrize(("n_workers", "step"), [(1, 0)])
def test_a_sample_that_raises_in_a_validation_is_named_by_key_and_index(fit, n_workers, step):
    words = (f"data.val._target_={OWN}.data.Broken", "+data.val.kind=raises")
    if step == 0:
        words = (*words, "trainer.num_sanity_val_steps=2")
    failed = fit(*words, f"data.num_workers={n_workers}", "trainer.max_steps=1", code=70)
    place = "in a worker" if n_workers else "in the training process"
    assert failed.errors == [
        f"error: ValueError: the sample is broken, {place}; "
        f"at step {step}, evaluation of data.val, samples of rank 0: 4, 5, 6, 7"
    ]
    assert failed.steps() == ([1] if step else [])

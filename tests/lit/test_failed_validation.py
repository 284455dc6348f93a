"""Several ranks save together, and a broken sample ends the run in one line."""

from __future__ import annotations

import pytest

from tests.lit.fit import CALLBACKS, DATA, TWO, fit

NODES = f"+callbacks.nodes._target_={CALLBACKS}.OneRankPerNode"
# tests/refused has other broken samples, in the first step.
BROKEN = {
    "short": (65, "data.train: samples [15, 18, 5, 6]: "),
    "raises": (70, "the sample is broken"),
}


def test_all_ranks_save_when_the_minutes_have_passed_on_rank_0():
    """Several ranks learn rank 0's decision one step later. The last step is always saved."""
    words = ("checkpoint.every_minutes=1e-9", "checkpoint.keep=9", "data.batch_size=2")
    assert fit(*words, *TWO, NODES).steps == [*range(2, 7)]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_sample_in_the_middle_of_an_epoch_ends_the_run(kind):
    words = (f"data.train._target_={DATA}.Broken", f"+data.train.kind={kind}")
    code, message = BROKEN[kind]
    failed = fit(*words, "data.train.num_samples=24", code=code)
    assert failed.status["step"] > 0 and message in failed.errors[0]


def test_a_sample_that_raises_in_a_validation_ends_the_run_before_its_first_step():
    words = (f"data.val._target_={DATA}.Broken", "+data.val.kind=raises", "data.num_workers=1")
    failed = fit(*words, "trainer.num_sanity_val_steps=2", "trainer.max_steps=1", code=70)
    (line,) = failed.errors
    assert line.startswith("error: ValueError: the sample is broken, in a worker; at step 0 ")
    assert not failed.steps

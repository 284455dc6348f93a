"""User modules of several ranks train and evaluate like one, with all of their state."""

from __future__ import annotations

import pytest
import torch

from tests.lit.fit import ACCURACY, MODULES, TWO, fit
from tests.run import same

FSDP = (*TWO, "strategy=fsdp", "trainer.val_check_interval=2", "checkpoint.keep=9")


@pytest.mark.slow
def test_two_ranks_train_and_evaluate_like_one_and_resume_extra_parameters(tmp_path):
    words = (
        f"{MODULES}.WithExtraParameters", "trainer.max_steps=3", ACCURACY,
        "module.loss.label_smoothing=0.1", "module.loss.z_loss=0.01", "data.val.num_samples=9",
    )  # fmt: skip
    one_rank = fit(*words, "data.batch_size=8")
    two_ranks = fit(*words, *FSDP)
    expected, state = one_rank.state()["weights"], two_ranks.state()["weights"]
    assert torch.allclose(expected["module.gain"], state["module.gain"], atol=1e-6)
    assert state["module.steps_seen"] == 3
    # Each rank has read other samples, and the buffers of all ranks are those of the checkpoint.
    assert two_ranks.metrics["val/token_sum"] == state["module.samples.token_sum"] > 0
    assert two_ranks.column("train/loss") == pytest.approx(one_rank.column("train/loss"), rel=1e-5)
    assert two_ranks.column("grad_norm") == pytest.approx(one_rank.column("grad_norm"), rel=1e-3)
    assert two_ranks.metrics["val/loss"] == pytest.approx(one_rank.metrics["val/loss"], rel=1e-5)
    assert two_ranks.metrics["val/top5"] == pytest.approx(one_rank.metrics["val/top5"], abs=1e-6)
    copy = two_ranks.copy_until(2, tmp_path / "copy")
    again = fit(*words, *FSDP, "ckpt_path=last", folder=copy)
    assert not (differences := same(two_ranks.state(), again.state())), differences[:8]

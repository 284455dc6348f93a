"""User modules work under every strategy, or are refused in one line that names the reason."""

from __future__ import annotations

import pytest
import torch

from tests.lit.conftest import ACCURACY, OWN, differences

MODULES = f"module._target_={OWN}.modules"
TWO = ("trainer.devices=2", "data.batch_size=4", "data.global_batch_size=8", "model.n_layers=2")
ONE = ("data.batch_size=8", "model.n_layers=2")
# Keys of model=gpt_nano that the nets of these tests do not have.
GPT_KEYS = ("d_model", "n_heads", "n_layers", "max_seq_len", "dropout", "activation")


# One rank


def test_gradients_computed_inside_training_step_are_not_added_to_the_steps_gradients(fit):
    run, plain = fit(f"{MODULES}.LooksAhead"), fit(name=None)
    assert run.column("grad_norm") == plain.column("grad_norm")


# Two ranks


def test_two_ranks_train_and_evaluate_like_one_and_resume_extra_parameters(fit):
    words = (
        f"{MODULES}.WithExtraParameters", "optimizer.lr=0.01", "trainer.max_steps=3", ACCURACY,
        "module.loss.label_smoothing=0.1", "module.loss.z_loss=0.01", "data.val.num_samples=9",
    )  # fmt: skip
    one_rank = fit(*ONE, *words, name=None)
    words += (*TWO, "strategy=fsdp", "trainer.val_check_interval=2", "checkpoint.keep=9")
    two_ranks = fit(*words, name="two")
    expected, state = one_rank.state(3)["state_dict"], two_ranks.state(3)["state_dict"]
    assert torch.allclose(expected["module.gain"], state["module.gain"], atol=1e-6)
    assert state["module.steps_seen"] == 3
    # Each rank has read other samples, and the buffers of all ranks are those of the checkpoint.
    assert two_ranks.metrics["val/token_sum"] == state["module.samples.token_sum"] > 0
    assert two_ranks.column("train/loss") == pytest.approx(one_rank.column("train/loss"), rel=1e-5)
    assert two_ranks.column("grad_norm") == pytest.approx(one_rank.column("grad_norm"), rel=1e-3)
    assert two_ranks.metrics["val/loss"] == pytest.approx(one_rank.metrics["val/loss"], rel=1e-5)
    assert two_ranks.metrics["val/top5"] == pytest.approx(one_rank.metrics["val/top5"], abs=1e-6)
    again = fit(*words, "ckpt_path=last", name=two_ranks.copy_until(2, "back"))
    assert not (mismatches := differences(two_ranks.state(3), again.state(3))), mismatches[:8]


@pytest.mark.slow
def test_buffers_that_change_in_training_are_identical_on_all_ranks(fit):
    """A checkpoint has the buffers of one rank: other ranks would evaluate and resume with others.

    Without the synchronization the validation loss of two ranks is not that of the checkpoint.
    """
    net = (f"model._target_={OWN}.nets.RunningMeans", *(f"~model.{key}" for key in GPT_KEYS))
    words = [word for word in TWO if "model." not in word]
    words = [*net, *words, "trainer.val_check_interval=2", "checkpoint.keep=9", "data.batch_size=4"]
    words += ["strategy=fsdp", "optimizer.lr=0.1", "trainer.max_steps=4"]
    two_ranks = fit(*words, name="two")
    ckpt = f"ckpt_path={two_ranks.folder}/checkpoints/step-00000004"
    one_rank = fit(*net, "task=validate", ckpt, name="one")
    assert one_rank.metrics["val/loss"] == pytest.approx(two_ranks.metrics["val/loss"], rel=1e-6)
    again = fit(*words, "ckpt_path=last", name=two_ranks.copy_until(2, "back"))
    assert not (mismatches := differences(two_ranks.state(4), again.state(4))), mismatches[:8]

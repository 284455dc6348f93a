"""User modules work under every strategy, or are refused in one line that names the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gptrain.checkpoints.store import CheckpointStore
from gptrain.lit.strategies import saving
from gptrain.lit.strategies.base import OneDevice
from gptrain.parallel.base import Parallel
from gptrain.parallel.state import module_name, saved_name
from tests.lit.conftest import ACCURACY, OWN, differences
from tests.lit.own.modules import WithExtraParameters

MODULES = f"module._target_={OWN}.modules"
TWO = ("trainer.devices=2", "data.batch_size=4", "data.global_batch_size=8", "model.n_layers=2")
ONE = ("data.batch_size=8", "model.n_layers=2")
# Keys of model=gpt_nano that the nets of these tests do not have.
GPT_KEYS = ("d_model", "n_heads", "n_layers", "max_seq_len", "dropout", "activation")


# One rank


def test_a_subclass_receives_gptrains_arguments_and_the_other_keys_of_the_group(fit):
    run = fit(f"{MODULES}.WithPenalty", "+module.weight=0.01")
    plain = fit(name=None)
    penalty = [0.01 * value for value in run.column("train/penalty")]
    assert run.column("train/loss")[0] == pytest.approx(plain.column("train/loss")[0] + penalty[0])
    assert run.metrics["val/loss"] != plain.metrics["val/loss"]


def test_gradients_computed_inside_training_step_are_not_added_to_the_steps_gradients(fit):
    run, plain = fit(f"{MODULES}.LooksAhead"), fit(name=None)
    assert run.column("grad_norm") == plain.column("grad_norm")


def test_extra_parameters_outside_the_net_are_saved_and_trained(fit):
    run = fit(f"{MODULES}.WithExtraParameters", "optimizer.lr=0.1")
    state = run.state(6)["state_dict"]
    assert state["module.steps_seen"] == 6
    assert state["module.mean_loss.mean_value"] > 0
    assert (state["module.gain"] < 0.9).all()  # trained towards 0.5
    assert run.column("gain")[-1] == pytest.approx(float(state["module.gain"].mean()))
    optimizer = run.state(6)["optimizer_states"][0]
    assert "module.gain" in optimizer["state"]
    # A parameter outside the net is never sharded, and has a group of its own.
    assert [group["params"] for group in optimizer["param_groups"]][2:] == [["module.gain"]]


def test_a_checkpoint_of_another_module_is_refused_where_ranks_hold_parts_of_the_net(tmp_path):
    net, strategy = nn.Linear(2, 2), OneDevice(Parallel())
    strategy.parallel.is_partitioned = True
    strategy.connect(WithExtraParameters(net, torch.optim.AdamW))
    state = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "module.steps_seen": torch.ones(())}
    store = CheckpointStore(tmp_path / "checkpoints", "a" * 32)
    store.save(1, {"model": state}, {})
    checkpoint = strategy.load_checkpoint(store.newest())
    message = "missing or unexpected outside the net: module.gain"
    with pytest.raises(ValueError, match=message):
        strategy.load_model_state_dict(checkpoint)
    strategy.load_model_state_dict(checkpoint, strict=False)
    assert net.weight.eq(1).all() and strategy.module.steps_seen == 1


def test_schedules_get_the_rates_of_the_groups_that_a_pipeline_stage_has(monkeypatch):
    """A checkpoint has all groups of the net. The options of the config are kept for a resume."""
    monkeypatch.setattr(saving.states, "load_optimizer_state", replace_rates)
    strategy = OneDevice(Parallel())
    strategy.connect(nn.Linear(3, 2))
    weight, bias = strategy.lightning_module.parameters()
    groups = [{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.2, "momentum": 0.9}]
    strategy.optimizers = [torch.optim.SGD(groups)]
    strategy._loaded = Path("of-another-run")
    of_three = {"base_lrs": [1.0, 2.0, 3.0], "_last_lr": [4.0, 5.0, 6.0], "lr_lambdas": [{}] * 3}
    of_two = {"base_lrs": [1.0, 2.0], "_last_lr": [4.0, 5.0]}
    checkpoint = {
        "optimizer_states": [{"values": {}, "param_groups": []}],
        "lr_schedulers": [dict(of_three), dict(of_two), {"step_size": 2}],
    }
    strategy.load_optimizer_state_dict(checkpoint)
    assert checkpoint["lr_schedulers"] == [
        {"base_lrs": [7.0, 8.0], "_last_lr": [0.7, 0.8], "lr_lambdas": []}, of_two,
        {"step_size": 2},
    ]  # fmt: skip
    assert [options["lr"] for options in strategy.fresh_options] == [0.1, 0.2]
    assert [options["momentum"] for options in strategy.fresh_options] == [0, 0.9]


def replace_rates(parameters, optimizer, *_):
    """Set the rates of a checkpoint, as loading it does."""
    for group, rate in zip(optimizer.param_groups, (7.0, 8.0), strict=True):
        group |= {"lr": rate / 10, "initial_lr": rate}


def test_a_name_in_a_checkpoint_loses_only_the_prefix_of_the_net():
    names = {
        "net.head.weight": "head.weight", "net.inner.net.bias": "inner.net.bias",
        "network.gain": "module.network.gain", "module.gain": "module.module.gain",
    }  # fmt: skip
    assert list(map(saved_name, names)) == list(names.values())
    assert list(map(module_name, names.values())) == list(names)


def test_a_module_may_override_the_loss_and_use_label_smoothing(fit):
    words = ("module.loss.label_smoothing=0.1",)
    smooth, own = fit(*words, name="smooth"), fit(*words, f"{MODULES}.OwnLoss", name="own")
    assert own.column("train/loss")[0] == pytest.approx(2 * smooth.column("train/loss")[0])
    fit(f"from_run={own.folder}", "task=validate", name="checked")


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


def test_a_plain_lightning_module_trains_under_ddp(fit):
    words = (f"{MODULES}.Plain",)
    one_rank, two_ranks = fit(*ONE, *words, name="one"), fit(*TWO, *words, name="two")
    assert two_ranks.column("train/loss") == pytest.approx(one_rank.column("train/loss"), rel=1e-4)


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


def test_a_step_that_calls_the_net_of_a_pipeline_is_refused(fit):
    line = fit(*TWO, "strategy=pipeline", f"{MODULES}.CallsNet", code=2).errors[0]
    assert "pipeline" in line and "net" in line


@pytest.mark.slow
def test_an_optimizer_that_calls_its_closure_twice_is_identical_on_two_ranks(fit):
    gone = (f"~optimizer.{key}" for key in ("betas", "eps"))
    words = (f"optimizer._target_={OWN}.nets.Twice", *gone, "optimizer.lr=0.1")
    one_rank, two_ranks = fit(*ONE, *words, name="one"), fit(*TWO, *words, name="two")
    assert two_ranks.column("train/loss") == pytest.approx(one_rank.column("train/loss"), rel=1e-5)
    expected, state = one_rank.state(6)["state_dict"], two_ranks.state(6)["state_dict"]
    for key in expected:
        assert torch.allclose(expected[key], state[key], atol=1e-6), key

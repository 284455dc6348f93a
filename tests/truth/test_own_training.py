"""Nets whose training differs from their evaluation train as their `forward` in one process."""

from __future__ import annotations

import json

import pytest

OWN = "tests.truth.own_training"
# 16 samples of 8 positions are read in steps of 2.
WORDS = (
    "model=gpt_nano", "model.vocab_size=64", "~model.d_model", "~model.n_heads", "~model.n_layers",
    "~model.max_seq_len", "~model.dropout", "~model.activation", "data.seq_len=9",
    "data.num_samples=16", "data.val.num_samples=4", "data.batch_size=2", "optimizer.lr=1e-2",
    "scheduler=constant", "trainer.max_steps=5", "trainer.val_check_interval=5",
    "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false",
    "trainer.gradient_clip_val=null", "callbacks=none", "logger=none", "checkpoint=none",
)  # fmt: skip
TWO = ("trainer.devices=2", "strategy.timeout_s=60")
PIPELINE = (*TWO, "strategy=pipeline", "strategy.microbatches=2")
ONE_EACH = (*TWO, "data.batch_size=1")  # two ranks that read the same step as one process


@pytest.fixture
def losses(train):
    """Return a function that trains a net and returns train/loss of each step, and val/loss."""

    def run(net, *words):
        name = f"run{len(made)}"
        made.append(name)
        run = train(*WORDS, f"model._target_={OWN}.{net}", *words, name=name, tiny=False)
        assert run.code == 0, run.out + run.err
        rows = [json.loads(row) for row in (run.folder / "metrics.jsonl").read_text().splitlines()]
        return [row[key] for row in rows for key in ("train/loss", "val/loss") if key in row]

    made = []
    return run


@pytest.fixture
def refused(train):
    """Return a function that checks that a run ends with code 2, and returns its error line."""

    def run(net, *words):
        run = train(*WORDS, f"model._target_={OWN}.{net}", *words, tiny=False)
        lines = [line for line in (run.out + run.err).splitlines() if line.startswith("error: ")]
        assert run.code == 2 and len(lines) == 1, run.out + run.err
        assert "Traceback" not in run.out + run.err
        return lines[0]

    return run


@pytest.mark.parametrize("net", ["CapsLogits", "DropsInHead"])
def test_what_only_forward_does_in_training_is_trained_although_the_net_has_hidden(net, losses):
    trained = losses(f"{net}Parts")
    assert len(trained) == 6
    assert trained == pytest.approx(losses(net), rel=1e-6)


@pytest.mark.parametrize("net", ["SkipsBlocks"])
def test_a_pipeline_refuses_a_net_that_is_another_chain_in_training(net, refused):
    line = refused(net, *PIPELINE)
    assert line.startswith("error: strategy.name=pipeline: ")


def test_a_net_with_the_same_parts_in_training_keeps_its_losses(losses):
    expected = losses("Chain")
    assert losses("WithHidden") == pytest.approx(expected, rel=1e-5)
    assert losses("Chain", *PIPELINE) == pytest.approx(expected, rel=1e-5)


def test_a_block_that_stands_twice_in_a_stage_is_run_twice(losses):
    expected = losses("SharesActivation")
    assert losses("SharesActivation", *PIPELINE) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("net", "mode"), [("ReplacesNet", "full"), ("BatchNormNet", "selective")])
def test_blocks_that_change_buffers_cannot_run_twice(net, mode, refused):
    line = refused(net, f"model.activation_checkpointing={mode}")
    assert line.startswith(f"error: model.activation_checkpointing={mode}: ")


FSDP = ("strategy=fsdp", *ONE_EACH)
FIND = "strategy.find_unused_parameters=true"
EACH = ("data.batch_size=1", "trainer.accumulate_grad_batches=2")


def test_ranks_that_use_different_parameters_train_as_one_process(losses):
    expected = losses("MixtureOfExperts", *EACH)
    assert losses("MixtureOfExperts", *FSDP, FIND) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "net, module",
    [("Chain", f"module._target_={OWN}.OwnScales")],
)
def test_without_the_option_such_a_step_ends_the_run(net, module, refused):
    line = refused(net, *FSDP, *([module] if module else []))
    assert line.startswith("error: strategy.find_unused_parameters=false: ")
    assert FIND in line

"""What a run under a strategy does besides the numbers that tests/truth compares."""

from __future__ import annotations

import pytest
import runs as helpers
import torch

import gptrain

TWO_STEPS = ("trainer.max_steps=2", "trainer.val_check_interval=2")


def run_of(runs, name, *words):
    return runs(*helpers.PLACES[name], *TWO_STEPS, *words)


@pytest.mark.parametrize("name", ["ddp", "tensor_parallel"])
def test_each_rank_draws_its_own_dropout(name, runs):
    run = run_of(runs, name, *helpers.DROPOUT[:2])
    masks = [run.record(rank)["mask"][:200] for rank in range(2)]
    assert all(mask.any() for mask in masks) and not torch.equal(*masks)


def test_fsdp_multiplies_and_gathers_in_bf16_and_reduces_gradients_in_fp32(runs):
    exact, rounded = (
        run_of(runs, "fsdp", *words).record() for words in ((), ("trainer.precision=bf16-mixed",))
    )
    assert (exact["dtype"], rounded["dtype"]) == ("torch.float32", "torch.bfloat16")
    gathered = [seen["sent"][0]["allgather"] for seen in (exact, rounded)]
    assert gathered[1] == gathered[0] / 2
    assert reduced(rounded) == reduced(exact)


def reduced(seen):
    """Return the bytes that were reduce-scattered in each micro-step of a step."""
    return [sent["reducescatter"] for sent in seen["sent"]]


def test_options_of_fsdp_have_their_effect(runs):
    """By default, gradients are reduced once per step. Four blocks are gathered twice."""
    default = run_of(runs, "fsdp").record()
    words = ("strategy.accumulate_shards=true", "strategy.reshard_after_forward=false")
    changed = run_of(runs, "fsdp", *words, "model.activation_checkpointing=full").record()
    first, last = reduced(default)
    assert first == 0 < last and reduced(changed) == [last, last]
    assert default["calls"][0]["allgather"] == 4 + 4 + 1
    assert all(calls["allgather"] <= 4 + 1 for calls in changed["calls"])
    assert sum(changed["products"]) > sum(default["products"])  # recomputed
    assert 2 * sum(changed["saved_bytes"]) < sum(default["saved_bytes"])


@pytest.mark.parametrize("name", ["fsdp", "tensor_parallel", "pipeline"])
def test_one_rank_equals_a_single_device(name, runs):
    run, truth = (
        runs(f"strategy={strategy}", "data.batch_size=8", *TWO_STEPS)
        for strategy in (name, "single")
    )
    helpers.check_losses(run, truth)


def test_a_sharded_checkpoint_is_loaded_as_the_net_of_one_process(runs):
    tokens = torch.arange(30).view(2, 15)
    with torch.no_grad():
        whole, sharded = (
            gptrain.load(run_of(runs, name).folder, "last")(tokens) for name in ("single", "fsdp")
        )
    torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-5)

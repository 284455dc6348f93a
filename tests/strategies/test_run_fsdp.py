"""strategy=fsdp through train.py."""

import runs as helpers


class TestStrategy(helpers.CheckpointingTests):
    name, data_ranks = "fsdp", [0, 1]


def test_bf16_mixed_gathers_weights_in_bf16_and_reduces_gradients_in_fp32(runs):
    run = runs(*helpers.PLACES["fsdp"], "trainer.precision=bf16-mixed", "trainer.max_steps=2")
    in_bf16, in_fp32 = run.record(), plain(runs)
    gathered, whole = (seen["sent"][0]["allgather"] for seen in (in_bf16, in_fp32))
    assert gathered == whole / 2
    assert reduced(in_bf16) == reduced(in_fp32)


def test_muon_equals_one_process(runs):
    helpers.check_muon(runs, "fsdp")


def plain(runs):
    return helpers.plain(runs, "fsdp").record()


def short(runs, option):
    """Run two steps with an option that must not change any value."""
    run = runs(*helpers.PLACES["fsdp"], "trainer.max_steps=2", option)
    truth = helpers.plain(runs, "single")
    helpers.check_close(run.column("train/loss"), truth.column("train/loss")[:2])
    helpers.check_close(run.column("grad_norm"), truth.column("grad_norm")[:2])
    return run.record()


def reduced(seen):
    """Return the bytes that were reduce-scattered in each micro-step of a step."""
    return [sent["reducescatter"] for sent in seen["sent"]]


def test_gradients_are_reduced_once_per_step_or_optionally_at_each_micro_step(runs):
    first, last = reduced(plain(runs))
    assert first == 0 < last
    assert reduced(short(runs, "strategy.accumulate_shards=true")) == [last, last]


def test_weights_that_are_kept_after_forward_are_gathered_once_less(runs):
    """Each of four blocks is gathered in the forward and the backward pass; the rest once."""
    kept = short(runs, "strategy.reshard_after_forward=false")
    # The first micro-step does not reshard: its gradients wait for the second micro-step.
    assert plain(runs)["calls"][0]["allgather"] == 4 + 4 + 1
    assert all(calls["allgather"] <= 4 + 1 for calls in kept["calls"])
